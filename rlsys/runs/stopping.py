"""A request to stop a run: after the current step, or in the middle of it once a period of grace is over."""

from rlsys.errors import StepAbandoned, WorkerLost
from rlsys.threads import REAL, Threads

GRACE_S = 25.0  # after SIGTERM, in which the current step may still finish


class StopSignal:
    """A signal handler calls `stop.request(GRACE_S)`. The loop checks `requested`; every wait calls `raise_if_stopped`."""

    def __init__(self, threads: Threads = REAL) -> None:
        self.threads = threads
        self.deadline: float | None = None
        self.grace_s = 0.0
        self.step_running = False  # if not, there is nothing to wait for
        self.saving = False  # the last checkpoint is being written, which gets the same grace again
        self.lost_worker = ""  # why the run cannot continue, such as a process of Ray that ended

    def request(self, grace_s: float) -> None:
        """Asks the run to stop. A second request does not prolong the grace of the first."""
        if self.deadline is None:
            self.grace_s = grace_s
            self.deadline = self.threads.now() + grace_s

    def mark_lost(self, reason: str) -> None:
        """Ends all waits: nothing that is waited for will answer any more."""
        self.lost_worker = reason

    def end_now(self) -> None:
        """Ends the waits of other threads, because the run is over."""
        self.grace_s, self.step_running, self.saving = 0.0, False, False
        self.deadline = self.threads.now()

    @property
    def requested(self) -> bool:
        return self.deadline is not None

    def raise_if_stopped(self) -> None:
        """Raises `WorkerLost` if the run cannot continue, `StepAbandoned` if its grace is over or no step runs."""
        if self.lost_worker:
            raise WorkerLost(self.lost_worker)
        if self.deadline is None:
            return
        overdue = self.threads.now() - self.deadline
        if overdue > self.grace_s if self.saving else overdue > 0 or not self.step_running:
            raise StepAbandoned
