"""`rlsys convert`: writes public data sets as files that `data.train` can name."""
