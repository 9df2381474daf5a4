"""`rlsys submit` and `rlsys job`: a run as a job of a cluster that is elsewhere."""
