"""Whether a configuration fits a cluster, by estimates. `rlsys plan` and `rlsys init` ask, and a run on GPUs for gradient checkpointing."""
