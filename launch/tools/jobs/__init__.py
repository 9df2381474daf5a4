"""`rlsys submit` and `rlsys job`: runs as jobs of a cluster elsewhere."""
