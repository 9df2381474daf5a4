"""The forward pass over a pack."""
