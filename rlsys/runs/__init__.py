"""The run directory and its contents: samples, checkpoints, events, timeline; also progress, stopping and errors."""
