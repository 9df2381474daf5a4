"""What all workers share: waiting with deadlines, replacing what is lost, stacks of what hangs."""
