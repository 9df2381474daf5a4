"""Engines with frozen weights, by the name that `models` gives them. Reward functions ask them."""
