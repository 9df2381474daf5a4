"""`rlsys convert`: public data sets as files that `data.train` can name."""
