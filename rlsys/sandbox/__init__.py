"""Runs programs that a model wrote, isolated from the host."""
