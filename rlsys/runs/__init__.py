"""The run directory and what lives in it: samples, checkpoints, events, timeline; progress, stopping, errors."""
