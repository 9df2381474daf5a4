"""Measures whether engines and policy compute the same log-probs, and explains why not if they do not."""
