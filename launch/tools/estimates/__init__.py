"""What a run needs, before it starts: memory, seconds, batch arithmetic. `rlsys plan` uses it."""
