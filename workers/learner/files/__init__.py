"""Reads and writes weights, adapters and checkpoints, and divides them among ranks."""
