"""Whether engines and policy compute the same log-probs, and why not if they do not."""
