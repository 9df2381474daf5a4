"""Who runs where: the command line, the Ray cluster, placement."""
