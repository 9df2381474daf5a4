"""From a batch to packs, and what a forward pass over a pack computes."""
