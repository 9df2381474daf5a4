"""The buffer of batches ahead of training: at most `max_lag` updates lie between sampling a batch and training on it.

    next() starts every batch that may start, then waits for the oldest:

        max_lag 0     start k ─ wait k ─ train k ─ sync ─ start k+1 …
        max_lag 1     start k+1 ─ wait k ─ train k (k+1 is being sampled) ─ wait until idle ─ sync ─ start k+2 …
        max_lag 2     start k+1, k+2 ─ train k ─ train k+1 ─ wait until idle ─ sync ─ start k+3, k+4 ─ train k+2 …
        in flight     start k+1 ─ wait k ─ train k (k+1 is being sampled) ─ sync (sampling goes on) ─ start k+2 …

Engines take new weights only while they are idle, so every batch has one version, which follows from the step numbers
alone (`SyncSchedule`). In flight they take weights while they sample.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import takewhile

from rlsys.config.derived import is_supervised
from rlsys.config.schema import Config
from rlsys.errors import NothingToLearn, TooManyRewardFailures
from rlsys.threads import REAL
from rlsys.types import Batch


@dataclass(frozen=True)
class SyncSchedule:
    """When batches may start, and after which steps engines take weights. This bounds how stale samples are.

    Between two syncs as many batches start as steps are trained. `SyncSchedule(ahead=2, every=2)`: after the sync of
    step 4 batches 6 and 7 start, from weights 4; batch 7 is trained two updates later.
    """

    ahead: int  # updates that may pass between the weights a batch starts with and its training
    every: int  # steps between syncs
    samples: bool = True  # false: batches come from the data, and engines take weights for evaluations only

    @classmethod
    def from_config(cls, config: Config) -> "SyncSchedule":
        """Over-sampling gets one update less: a half-written sample is trained one step later than the others."""
        ahead = config.pipeline.max_lag - bool(config.rollout.oversample)
        every = 1 if config.pipeline.in_flight else max(1, ahead)
        return cls(ahead, every, samples=not is_supervised(config))

    def syncs_after(self, step: int) -> bool:
        """True if engines take the weights of this step."""
        return self.samples and self.version_after(step) == step

    def version_after(self, step: int) -> int:
        """The weight version that batches are sampled from after this step."""
        return step // self.every * self.every

    def last_startable_step(self, step: int) -> int:
        """The last batch that may start before `step` is trained."""
        return self.version_after(step - 1) + 1 + self.ahead

    def round_up_to_sync(self, steps: int) -> int:
        """Rounds a number of steps up to whole sync intervals, over which a mean duration must be taken."""
        return -(-steps // self.every) * self.every


class Pipeline:
    """Hands out batches in order. `collect(step)` samples and judges one, on a thread of its own.

    `ready` are batches that a checkpoint had saved.
    """

    def __init__(
        self,
        collect: Callable[[int], Batch],
        *,
        first: int,
        last: int,
        schedule: SyncSchedule,
        ready: Sequence[Batch] = (),
        thread: Executor | None = None,
    ):
        self.collect, self.last, self.schedule = collect, last, schedule
        self.first = first
        self.next_step = first  # whose batch is handed out next
        self.next_start = first + len(ready)  # whose batch is started next
        self.started: deque[Future[Batch]] = deque(done(batch) for batch in ready)
        self.started_before: list[Future[Batch]] = []  # what was started when the last batch was asked for
        self.versions: dict[int, int] = {}  # of the weights that engines had when they began a batch
        # One thread: batches are sampled in order.
        self.thread = thread or REAL.executor("collect")

    def next(self) -> Batch:
        self.started_before = list(self.started)
        while self.next_start <= min(self.schedule.last_startable_step(self.next_step), self.last):
            self.started.append(self.thread.submit(self.collect, self.next_start))
            self.versions[self.next_start] = max(self.schedule.version_after(self.next_step - 1), self.first - 1)
            self.next_start += 1
        self.next_step += 1
        return self.started.popleft().result()

    def wait_until_idle(self, *, after: int) -> None:
        """Waits for the batches that were started before the weights of step `after` reach the engines.

        Newer weights would sample other batches, so an error in one of these must stop the present step. If nothing can
        be learned from a batch, `next` raises that.
        """
        for error in [batch.exception() for batch in self._ahead_of(after)]:  # waits for all of them
            if error and not isinstance(error, TooManyRewardFailures | NothingToLearn):
                raise error

    def finished_ahead(self, *, after: int) -> list[Batch]:
        """The batches behind step `after` that are sampled already, up to the first that is not or that failed."""
        finished = takewhile(lambda batch: batch.done() and not batch.exception(), self._ahead_of(after))
        return [batch.result() for batch in finished]

    def given_up(self, *, after: int) -> list[int]:
        """The unfinished batches behind step `after` that a run resumed there samples from newer weights."""
        ahead = range(after + 1, after + 1 + len(self._ahead_of(after)))
        return [batch for batch in ahead[len(self.finished_ahead(after=after)) :] if self.versions[batch] < after]

    def _ahead_of(self, step: int) -> list[Future[Batch]]:
        """Started batches behind a finished step. The one handed out last counts too, if its step is not finished."""
        return self.started_before if step < self.next_step - 1 else list(self.started)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def done(batch: Batch) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future
