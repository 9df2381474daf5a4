"""Tasks that come with the package, as data sets `builtin:NAME`."""
