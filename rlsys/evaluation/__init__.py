"""Figures on held-out prompts: accuracy, pass@k, intervals."""
