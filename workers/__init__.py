"""The processes: rollout engines, reward processes, reference and policy ranks, and how weights travel."""
