"""Deals samples to reward processes as they come free.

Cheap verdicts travel in lists, which keeps the cost of a message away from them; dear ones one at a time, so that nothing waits
behind a sample that hangs. What comes back unjudged, because another sample took its process down, is dealt again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.reward.supervisor import JudgeResult, RewardItem

LIST_SECONDS = 0.02  # what a list may take to judge
MAX_LIST = 64
ASYNC_LISTS = 8  # that a worker is at where functions are async: its threads wait for them
MAX_ATTEMPTS = 50  # times that a sample is dealt before it counts as failed

Submit = Callable[[list[RewardItem]], "Future[list[JudgeResult]]"]


class PendingVerdicts(Future[list[Verdict]]):
    """All verdicts of one call, in its order, when the last one is there."""

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
    lists: int = 0  # that it is at
    alone: bool = False  # whether it is at a sample that wants to be alone


def dispatch_limits(settings: RewardSettings, ready: dict[str, Any]) -> dict[str, int]:
    """How many samples a worker of such functions is given."""
    if ready["waits"]:
        return {
            "together": max(1, settings.concurrency // ASYNC_LISTS, settings.batch * ready["batched"]),
            "lists": ASYNC_LISTS,
        }
    return {"together": settings.batch if ready["batched"] else 1}


class Dispatcher:
    """`together` is how many samples a process judges at once: 1, or more where functions are async or batched."""

    def __init__(self, submits: Mapping[str, Submit], *, together: int = 1, lists: int = 1):
        self.workers = [WorkerState(name, submit) for name, submit in submits.items()]
        self.together, self.lists = together, lists
        self.waiting: deque[PendingItem] = deque()
        self.seconds_per_verdict = 0.001  # seconds per verdict, of late
        self.lock = threading.RLock()

    def judge(self, items: list[RewardItem]) -> PendingVerdicts:
        verdicts = PendingVerdicts(len(items))
        with self.lock:
            self.waiting.extend(PendingItem(item, verdicts, i) for i, item in enumerate(items))
            self.dispatch()
        return verdicts

    def busy_workers(self) -> list[str]:
        """The workers that have samples to judge."""
        return [w.name for w in self.workers if w.lists]

    def dispatch(self) -> None:
        """Gives what is waiting to who has room, the least busy first."""
        while self.waiting:
            free = [w for w in self.workers if w.lists < self.max_lists() and not w.alone]
            alone = self.waiting[0].item.alone
            if alone:
                free = [w for w in free if not w.lists]
            if not free:
                return
            worker = min(free, key=lambda w: w.lists)
            count = 1 if alone else self.list_length()
            share: list[PendingItem] = []
            while self.waiting and len(share) < count and (alone or not self.waiting[0].item.alone):
                share.append(self.waiting.popleft())
            self.send_list(worker, share, alone)

    def max_lists(self) -> int:
        """Two on the way keep a process busy that is done with a list in no time."""
        return max(self.lists, 2 if self.seconds_per_verdict * self.list_length() < LIST_SECONDS else 1)

    def list_length(self) -> int:
        """How many samples make a list."""
        if self.together > 1:
            return self.together
        share = -(-len(self.waiting) // len(self.workers))
        return max(1, min(int(LIST_SECONDS / self.seconds_per_verdict), share, MAX_LIST))

    def send_list(self, worker: WorkerState, share: list[PendingItem], alone: bool) -> None:
        worker.lists += 1
        worker.alone = alone
        began = time.perf_counter()
        for place in share:
            place.attempts += 1
        answers = worker.submit([place.item for place in share])
        answers.add_done_callback(lambda done: self.on_answers(worker, share, time.perf_counter() - began, done))

    def on_answers(
        self, worker: WorkerState, share: list[PendingItem], seconds: float, done: "Future[list[JudgeResult]]"
    ) -> None:
        with self.lock:
            worker.lists -= 1
            worker.alone = False
            self.seconds_per_verdict += 0.2 * (seconds / len(share) - self.seconds_per_verdict)
            error = done.exception()
            if error is not None:
                for place in share:
                    if not place.verdicts.done():
                        place.verdicts.set_exception(error)
            else:
                for place, answer in zip(reversed(share), reversed(done.result()), strict=True):
                    self.accept_answer(place, answer)
            self.dispatch()

    def accept_answer(self, place: PendingItem, answer: JudgeResult) -> None:
        if isinstance(answer, Verdict):
            place.verdicts.set_verdict(place.index, answer)
        elif place.attempts >= MAX_ATTEMPTS:
            sentence = f"{MAX_ATTEMPTS} reward processes ended while it waited for its turn"
            place.verdicts.set_verdict(place.index, Verdict(None, failure="crash", detail=sentence))
        else:
            place.item = answer
            self.waiting.appendleft(place)
