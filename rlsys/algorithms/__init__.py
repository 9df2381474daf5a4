"""Advantages, losses, corrections, KL: pure functions, tensors in, tensors out."""
