"""Sends samples to reward workers as soon as these are free.

Samples that are judged quickly are sent in lists, which saves messages. Slow ones are sent one at a time, so that none
waits behind one that hangs. A sample that comes back unjudged, because another sample ended its process, is retried.

The thread of a `Dispatcher` consumes new samples and what workers answer. It waits for either, and is woken by both.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.errors import WorkerLost
from rlsys.rewards.judge import combine_verdicts
from rlsys.rewards.settings import FunctionSets, RewardSettings
from rlsys.types import Verdict
from workers.fleet.pool import Line, WorkPool
from workers.fleet.replaceable_workers import MAX_ATTEMPTS as MAX_LOST
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import POLL_S, Watchdog
from workers.reward.sample_queue import JudgeResult, RewardItem

LIST_SECONDS = 0.02  # the time a list may take to judge
MAX_LIST = 64  # samples
ASYNC_LISTS = 8  # lists that a worker with async functions judges at once; one thread waits for each
MAX_ATTEMPTS = 50  # a sample that was sent this many times has failed

Combine = Callable[[int, list[Verdict]], Verdict]  # a sample's place, and the verdicts of all services on it


class Judging:
    """One `judge` call: the verdicts that have arrived, and the future of all."""

    def __init__(self, future: Future[list[Verdict]], parts: list[list[int]], combine: Combine):
        """`parts` are the services that judge each sample."""
        self.future, self.combine = future, combine
        self.verdicts: list[dict[int, Verdict | None]] = [dict.fromkeys(services) for services in parts]
        self.missing = sum(map(len, parts))
        self.finish_if_complete()

    def set_verdict(self, place: int, service: int, verdict: Verdict) -> None:
        self.verdicts[place][service] = verdict
        self.missing -= 1
        self.finish_if_complete()

    def finish_if_complete(self) -> None:
        if not self.missing:
            of_samples = ([v for v in verdicts.values() if v] for verdicts in self.verdicts)
            self.settle([self.combine(place, verdicts) for place, verdicts in enumerate(of_samples)])

    def settle(self, outcome: list[Verdict] | BaseException) -> None:
        with suppress(InvalidStateError):  # it has failed on another thread
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


@dataclass
class PendingItem:
    """An item, and where its verdict goes."""

    item: RewardItem
    judging: Judging
    place: int
    service: int
    attempts: int = 0


@dataclass
class Service:
    """Workers that run the same functions, and the samples that wait for them."""

    functions: FunctionSets
    workers: list[str]
    list_size: int = 1  # samples that a process judges at once: more than 1 where functions are async or batched
    lists_per_worker: int = 1
    pending: deque[PendingItem] = field(default_factory=deque)
    seconds_per_verdict: float = 0.001  # moving average

    @classmethod
    def of_ready_workers(cls, settings: RewardSettings, workers: list[str], ready_info: dict[str, Any]) -> "Service":
        """`ready_info` comes from a process of these workers."""
        batched = ready_info["batched"]
        if ready_info["has_async"]:
            list_size = max(1, settings.concurrency // ASYNC_LISTS, settings.batch * batched)
            return cls(settings.functions, workers, list_size, ASYNC_LISTS)
        return cls(settings.functions, workers, settings.batch if batched else 1)

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

    def take_list(self) -> list[PendingItem]:
        """Takes the next samples: one that must be judged alone, or some that need not."""
        if self.pending[0].item.alone:
            return [self.pending.popleft()]
        count, samples = self.list_length(), list[PendingItem]()
        while self.pending and len(samples) < count and not self.pending[0].item.alone:
            samples.append(self.pending.popleft())
        return samples


def explain_unsent(items: list[RewardItem], error: Exception) -> list[JudgeResult]:
    """Tries each sample of a list that could not be sent alone. One that was alone has failed."""
    if len(items) > 1:
        return [replace(item, alone=True) for item in items]
    return [Verdict(None, failure="exception", detail=f"it cannot be sent to a reward process: {error!r}")]


class Dispatcher:
    def __init__(self, workers: ReplaceableWorkers, watchdog: Watchdog, services: list[Service]):
        self.services, self.watchdog = services, watchdog
        self.service_of = {name: service for service in services for name in service.workers}
        self.pool: WorkPool[int, PendingItem] = WorkPool(
            workers, watchdog, "judging samples", lambda sample: sample.item.uid, MAX_LOST
        )
        self.numbers = itertools.count()  # of samples
        self.sent: dict[Line[int], float] = {}  # lists that are being judged, and since when
        self.new: deque[tuple[Service, PendingItem]] = deque()  # from other threads
        self.error: BaseException | None = None  # why nothing can be judged any more

    def start(self) -> None:
        self.watchdog.threads.start(self.run, "judge")

    def judge(
        self, items: list[RewardItem], combine: Combine = lambda _, verdicts: combine_verdicts(verdicts)
    ) -> Judging:
        """Any thread may call it. `combine` makes the verdict on a sample of those that the services have on it."""
        services = [[n for n, s in enumerate(self.services) if item.function_set in s.functions] for item in items]
        judging = Judging(self.watchdog.threads.future(), services, combine)
        for place, item in enumerate(items):
            for n in services[place]:
                self.new.append((self.services[n], PendingItem(item, judging, place, n)))
        self.pool.wake()
        if self.error:
            self.fail_all(self.error)
        return judging

    def waiting_count(self) -> int:
        """Counts the samples that no worker has. Any thread may call it."""
        return len(self.new) + sum(len(service.pending) for service in self.services)

    # --- the dispatcher's thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while True:
                self.step()
        except BaseException as error:
            self.error = error
            self.fail_all(error)

    def step(self, timeout_s: float = POLL_S) -> None:
        """Waits for new samples or an answer, and sends on what can be sent."""
        news = self.pool.poll(timeout_s)
        while self.new:
            service, sample = self.new.popleft()
            service.pending.append(sample)
        if news:
            self.on_news(*news)
        for service in self.services:
            self.send_pending(service)

    def send_pending(self, service: Service) -> None:
        """Sends samples to the workers with room, to the least busy one first."""
        while service.pending:
            lists = Counter(line.worker for line in self.sent)
            limit = 1 if service.pending[0].item.alone else service.max_lists()
            free = [w for w in service.workers if lists[w] < limit and not self.judges_alone(w)]
            if not free:
                return
            self.send_list(service, min(free, key=lambda w: lists[w]))

    def judges_alone(self, worker: str) -> bool:
        return any(sample.item.alone for sample in self.pool.held[worker].values())

    def send_list(self, service: Service, worker: str) -> None:
        samples = service.take_list()
        for sample in samples:
            sample.attempts += 1
        items = [sample.item for sample in samples]
        by_number = dict(zip(self.numbers, samples, strict=False))
        try:
            line = self.pool.open(worker, "judge", items, items=by_number)
        except Exception as error:  # such as a row that cannot be pickled
            self.accept(service, samples, explain_unsent(items, error))
        else:
            self.sent[line] = self.watchdog.threads.now()

    def on_news(self, line: Line[int], news: Any) -> None:
        service = self.service_of[line.worker]
        if isinstance(news, WorkerLost):
            for sample in reversed(self.pool.lose(line.worker).values()):
                service.pending.appendleft(sample)
            self.sent = {sent: since for sent, since in self.sent.items() if sent.worker != line.worker}
            self.pool.replace(line.worker, news)
        elif isinstance(news, Exception):
            raise news
        else:
            seconds = self.watchdog.threads.now() - self.sent.pop(line)
            service.seconds_per_verdict += 0.2 * (seconds / len(news) - service.seconds_per_verdict)
            taken = [self.pool.take(line, number) for number in list(line.missing)]
            self.accept(service, [sample for sample in taken if sample], news)

    def accept(self, service: Service, samples: list[PendingItem], results: list[JudgeResult]) -> None:
        """Passes verdicts on, and puts the others to the front: backwards, so that they keep their order."""
        for sample, result in zip(reversed(samples), reversed(results), strict=True):
            if not isinstance(result, Verdict) and sample.attempts >= MAX_ATTEMPTS:
                detail = f"{MAX_ATTEMPTS} reward processes ended while it waited for its turn"
                result = Verdict(None, failure="crash", detail=detail)
            if isinstance(result, Verdict):
                sample.judging.set_verdict(sample.place, sample.service, result)
            else:
                sample.item = result
                service.pending.appendleft(sample)

    def fail_all(self, error: BaseException) -> None:
        """Raises the error in everyone who waits for a verdict."""
        waiting = [sample for service in self.services for sample in service.pending]
        with suppress(IndexError):
            while True:
                waiting.append(self.new.popleft()[1])
        held = [sample for items in self.pool.held.values() for sample in items.values()]
        for sample in [*waiting, *held]:
            sample.judging.settle(error)
