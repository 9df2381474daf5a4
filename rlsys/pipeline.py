"""From prompts to judged batches, at most `max_lag` updates ahead of training.

    next() starts every batch that may be started, then waits for the oldest:

        max_lag 0     start k ─ wait k ─ train k ─ sync ─ start k+1 …
        max_lag 1     start k+1 ─ wait k ─ train k (k+1 is being generated) ─ drain ─ sync ─ start k+2 …
        max_lag 2     start k+1, k+2 ─ train k ─ train k+1 ─ drain ─ sync ─ start k+3, k+4 ─ train k+2 …
        in flight     start k+1 ─ wait k ─ train k (k+1 is being generated) ─ sync (and goes on) ─ start k+2 …

Engines take new weights only when they are idle (`drain`), so a batch is of one version, which follows from the numbers of the
steps alone (`Timetable`). In flight they take them while they sample. A sample goes to the reward pool the moment it is seen;
nothing waits for the slowest prompt but the batch itself.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

from rlsys.config.schema import Config
from rlsys.runs.errors import NothingToLearn, TooManyRewardFailures
from rlsys.types import Batch


@dataclass(frozen=True)
class SyncSchedule:
    """Which batches may be begun when, and after which steps engines take weights: what bounds the lag.

    Between two syncs as many batches are begun as steps are trained. `Timetable(ahead=2, every=2)`: after the sync of step 4
    batches 6 and 7 are begun, from weights 4; batch 7 is trained two updates later.
    """

    ahead: int  # updates that may pass between the weights a batch is begun with and its training
    every: int  # steps between syncs

    @classmethod
    def from_config(cls, config: Config) -> "SyncSchedule":
        """With over-sampling one update less: a half-written sample is trained a step later than the others."""
        ahead = config.pipeline.max_lag - bool(config.rollout.oversample)
        return cls(ahead, every=1 if config.pipeline.in_flight else max(1, ahead))

    def syncs_after(self, step: int) -> bool:
        """Whether engines take the weights of this step."""
        return self.version_after(step) == step

    def version_after(self, step: int) -> int:
        """The version that batches are sampled from after this step."""
        return step // self.every * self.every

    def last_startable_step(self, step: int) -> int:
        """The last batch that may be begun before `step` is trained."""
        return self.version_after(step - 1) + 1 + self.ahead

    def round_up_to_sync(self, steps: int) -> int:
        """As many or a few more: a step behind a sync waits for less than one before it, so a mean is of all between two syncs."""
        return -(-steps // self.every) * self.every


class Pipeline:
    """Batches in order, `start(step)` samples and judges one. `ready` are those from step `first` on that are there already."""

    def __init__(
        self,
        start: Callable[[int], Batch],
        *,
        first: int,
        last: int,
        timetable: SyncSchedule,
        ready: Sequence[Batch] = (),
        thread: Executor | None = None,
    ):
        self.start, self.last, self.schedule = start, last, timetable
        self.step = first  # whose batch is the next to be handed out
        self.upcoming = first + len(ready)
        self.ahead: deque[Future[Batch]] = deque(done(batch) for batch in ready)
        self.before: list[Future[Batch]] = []
        # One: batches are generated in order.
        self.thread = thread or ThreadPoolExecutor(1, thread_name_prefix="collect")

    def next(self) -> Batch:
        self.before = list(self.ahead)
        while self.upcoming <= min(self.schedule.last_startable_step(self.step), self.last):
            self.ahead.append(self.thread.submit(self.start, self.upcoming))
            self.upcoming += 1
        self.step += 1
        return self.ahead.popleft().result()

    def wait_until_idle(self, *, undo: bool = False) -> None:
        """Waits until the engines are idle. That nothing can be learned from a batch is for `next` to say.

        A batch that was lost could not be made again once the engines have new weights: so the present step must not count.
        """
        futures = self.before if undo else list(self.ahead)
        for error in [future.exception() for future in futures]:  # all of them are waited for
            if error and not isinstance(error, TooManyRewardFailures | NothingToLearn):
                raise error

    def finished_ahead(self, *, undo: bool = False) -> list[Batch]:
        """What the engines have sampled ahead of the last step; with `undo`, ahead of the step before it.

        Batches that are still being made are left out, and those behind one that failed.
        """
        whole = takewhile(lambda f: f.done() and not f.exception(), self.before if undo else list(self.ahead))
        return [future.result() for future in whole]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def done(batch: Batch) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future
