"""The wish to end a run in good order: after the step that is going on, or without it once the grace is over."""

import time

from rlsys.runs.errors import Abandoned, WorkerLost


class Stop:
    """`stop.request(25)` may come from a signal handler; the loop looks at `requested`, waits call `check`."""

    def __init__(self) -> None:
        self.until: float | None = None
        self.grace_s = 0.0
        self.working = False  # whether a step is going on: else nothing is worth waiting for
        self.saving = False  # what is done is being saved: this gets the same grace again
        self.lost = ""  # what the run cannot go on without

    def request(self, grace_s: float) -> None:
        """A second wish does not prolong the first."""
        if self.until is None:
            self.grace_s = grace_s
            self.until = time.monotonic() + grace_s

    def lose(self, what: str) -> None:
        """Nobody who waits will get an answer any more."""
        self.lost = what

    def end(self) -> None:
        """The run is over, whatever for: what other threads still wait for need not come any more."""
        self.grace_s, self.working, self.saving = 0.0, False, False
        self.until = time.monotonic()

    @property
    def requested(self) -> bool:
        return self.until is not None

    def check(self) -> None:
        """Raises `Abandoned` when the grace is over, or has no purpose; `WorkerLost` when waiting has none."""
        if self.lost:
            raise WorkerLost(self.lost)
        if self.until is None:
            return
        over = time.monotonic() - self.until
        if over > self.grace_s if self.saving else over > 0 or not self.working:
            raise Abandoned
