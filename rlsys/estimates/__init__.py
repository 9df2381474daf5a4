"""What a run would take, before it starts: memory, seconds, batch arithmetic. `rlsys plan` uses it."""
