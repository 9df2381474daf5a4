"""The wish to end a run in good order: after the step that is going on, or without it once the grace is over."""

import time

from rlsys.runs.errors import StepAbandoned, WorkerLost


class StopSignal:
    """`stop.request(25)` may come from a signal handler; the loop looks at `requested`, waits call `check`."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.grace_s = 0.0
        self.step_running = False  # whether a step is going on: else nothing is worth waiting for
        self.saving = False  # what is done is being saved: this gets the same grace again
        self.lost_worker = ""  # what the run cannot go on without

    def request(self, grace_s: float) -> None:
        """A second wish does not prolong the first."""
        if self.deadline is None:
            self.grace_s = grace_s
            self.deadline = time.monotonic() + grace_s

    def mark_lost(self, what: str) -> None:
        """Nobody who waits will get an answer any more."""
        self.lost_worker = what

    def end_now(self) -> None:
        """The run is over, whatever for: what other threads still wait for need not come any more."""
        self.grace_s, self.step_running, self.saving = 0.0, False, False
        self.deadline = time.monotonic()

    @property
    def requested(self) -> bool:
        return self.deadline is not None

    def raise_if_stopped(self) -> None:
        """Raises `Abandoned` when the grace is over, or has no purpose; `WorkerLost` when waiting has none."""
        if self.lost_worker:
            raise WorkerLost(self.lost_worker)
        if self.deadline is None:
            return
        over = time.monotonic() - self.deadline
        if over > self.grace_s if self.saving else over > 0 or not self.step_running:
            raise StepAbandoned
