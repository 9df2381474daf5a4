"""Episode processes: they play a user's function on many rows at once, and are watched and replaced."""
