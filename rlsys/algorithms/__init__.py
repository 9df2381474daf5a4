"""Advantages, losses, corrections and KL: pure functions from tensors to tensors."""
