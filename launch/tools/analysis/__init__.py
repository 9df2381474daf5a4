"""Reads finished and running runs: findings, traces, events, other rewards. Nothing in training imports it."""
