"""From a batch to packs, and the forward pass over a pack."""
