"""Sends samples to reward processes as soon as these are free.

Samples that are judged quickly are sent in lists, which saves messages. Slow ones are sent one at a time, so that none
waits behind one that hangs. A sample that comes back unjudged, because another sample ended its process, is retried.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.reward.sample_queue import JudgeResult, RewardItem

LIST_SECONDS = 0.02  # the time a list may take to judge
MAX_LIST = 64  # samples
ASYNC_LISTS = 8  # lists that a worker with async functions judges at once; one thread waits for each
MAX_ATTEMPTS = 50  # a sample that was sent this many times has failed

Submit = Callable[[list[RewardItem]], "Future[list[JudgeResult]]"]


class PendingVerdicts(Future[list[Verdict]]):
    """The verdicts of one `judge` call, in its order, done when the last one has arrived."""

    def __init__(self, count: int):
        super().__init__()
        self.verdicts: list[Verdict | None] = [None] * count
        self.missing = count
        if not count:
            self.set_result([])

    def set_verdict(self, i: int, verdict: Verdict) -> None:
        self.verdicts[i] = verdict
        self.missing -= 1
        if not self.missing and not self.done():
            self.set_result([v for v in self.verdicts if v is not None])


@dataclass
class PendingItem:
    """An item, and where its verdict goes."""

    item: RewardItem
    verdicts: PendingVerdicts
    index: int
    attempts: int = 0


@dataclass
class WorkerState:
    name: str
    submit: Submit
    running_lists: int = 0
    exclusive: bool = False  # whether it judges a sample that must be judged alone


def dispatch_limits(settings: RewardSettings, ready_info: dict[str, Any]) -> dict[str, int]:
    """Returns how many samples a worker is sent at once, as options of `Dispatcher`.

    `ready_info` comes from its process.
    """
    batched = ready_info["batched"]
    if ready_info["has_async"]:
        list_size = max(1, settings.concurrency // ASYNC_LISTS, settings.batch * batched)
        return {"list_size": list_size, "lists_per_worker": ASYNC_LISTS}
    return {"list_size": settings.batch if batched else 1}


def explain_unsent(items: list[RewardItem], error: Exception) -> list[JudgeResult]:
    """The results of a list that could not be sent: each sample is tried alone, and has failed if it was alone."""
    if len(items) > 1:
        return [replace(item, alone=True) for item in items]
    return [Verdict(None, failure="exception", detail=f"it cannot be sent to a reward process: {error!r}")]


class Dispatcher:
    """`list_size` is how many samples a process judges at once: 1, or more where functions are async or batched."""

    def __init__(self, submits: Mapping[str, Submit], *, list_size: int = 1, lists_per_worker: int = 1):
        self.workers = [WorkerState(name, submit) for name, submit in submits.items()]
        self.list_size, self.lists_per_worker = list_size, lists_per_worker
        self.pending: deque[PendingItem] = deque()
        self.seconds_per_verdict = 0.001  # moving average
        self.lock = threading.RLock()
        self.dispatching = False

    def judge(self, items: list[RewardItem]) -> PendingVerdicts:
        verdicts = PendingVerdicts(len(items))
        with self.lock:
            self.pending.extend(PendingItem(item, verdicts, i) for i, item in enumerate(items))
            self.dispatch()
        return verdicts

    def busy_workers(self) -> list[str]:
        return [w.name for w in self.workers if w.running_lists]

    def dispatch(self) -> None:
        """Sends pending samples to workers with room, to the least busy one first."""
        if self.dispatching:  # a list came back at once: the loop below goes on
            return
        self.dispatching = True
        try:
            self.send_pending()
        finally:
            self.dispatching = False

    def send_pending(self) -> None:
        while self.pending:
            free = [w for w in self.workers if w.running_lists < self.max_lists() and not w.exclusive]
            alone = self.pending[0].item.alone
            if alone:
                free = [w for w in free if not w.running_lists]
            if not free:
                return
            worker = min(free, key=lambda w: w.running_lists)
            count = 1 if alone else self.list_length()
            samples: list[PendingItem] = []
            while self.pending and len(samples) < count and (alone or not self.pending[0].item.alone):
                samples.append(self.pending.popleft())
            self.send_list(worker, samples, alone)

    def max_lists(self) -> int:
        """Returns the number of lists per worker.

        While a quick list is judged, a second one is sent already, so that the process is always busy.
        """
        return max(self.lists_per_worker, 2 if self.seconds_per_verdict * self.list_length() < LIST_SECONDS else 1)

    def list_length(self) -> int:
        """Returns the number of samples in the next list."""
        if self.list_size > 1:
            return self.list_size
        fair_share = -(-len(self.pending) // len(self.workers))
        return max(1, min(int(LIST_SECONDS / self.seconds_per_verdict), fair_share, MAX_LIST))

    def send_list(self, worker: WorkerState, samples: list[PendingItem], exclusive: bool) -> None:
        worker.running_lists += 1
        worker.exclusive = exclusive
        began = time.perf_counter()
        for sample in samples:
            sample.attempts += 1
        items = [sample.item for sample in samples]
        try:
            results = worker.submit(items)
        except RayError as error:
            results = Future()
            results.set_exception(error)
        except Exception as error:  # such as a row that cannot be pickled
            results = Future()
            results.set_result(explain_unsent(items, error))
        results.add_done_callback(lambda done: self.on_results(worker, samples, time.perf_counter() - began, done))

    def on_results(
        self, worker: WorkerState, samples: list[PendingItem], seconds: float, results: "Future[list[JudgeResult]]"
    ) -> None:
        with self.lock:
            worker.running_lists -= 1
            worker.exclusive = False
            self.seconds_per_verdict += 0.2 * (seconds / len(samples) - self.seconds_per_verdict)
            error = results.exception()
            if error is not None:
                for sample in samples:
                    if not sample.verdicts.done():
                        sample.verdicts.set_exception(error)
            else:  # backwards, so that samples to be retried keep their order at the front
                for sample, result in zip(reversed(samples), reversed(results.result()), strict=True):
                    self.accept_or_retry(sample, result)
            self.dispatch()

    def accept_or_retry(self, sample: PendingItem, result: JudgeResult) -> None:
        if isinstance(result, Verdict):
            sample.verdicts.set_verdict(sample.index, result)
        elif sample.attempts >= MAX_ATTEMPTS:
            detail = f"{MAX_ATTEMPTS} reward processes ended while it waited for its turn"
            sample.verdicts.set_verdict(sample.index, Verdict(None, failure="crash", detail=detail))
        else:
            sample.item = result
            self.pending.appendleft(sample)
