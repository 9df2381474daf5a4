"""`rlsys init`: a first configuration, commented, that fits."""
