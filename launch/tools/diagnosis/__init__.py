"""Finds why log-probs of engines and policy differ."""
