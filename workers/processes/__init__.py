"""Processes that run a user's functions: started, watched, killed with all that they start, and replaced."""
