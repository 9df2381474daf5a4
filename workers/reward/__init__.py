"""Reward processes: started, fed, timed, replaced."""
