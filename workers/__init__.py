"""The processes: rollout engines, reward processes, the reference, policy ranks, and how weights travel between them."""
