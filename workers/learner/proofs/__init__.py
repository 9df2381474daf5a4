"""Compares what a model computes with what it should compute. Whoever starts a rank calls these proofs."""
