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
from workers.reward.supervisor import Answer, Item

LIST_S = 0.02  # what a list may take to judge
LONGEST_LIST = 64
LISTS = 8  # that a worker is at where functions are async: its threads wait for them
TRIES = 50  # times that a sample is dealt before it counts as failed

Submit = Callable[[list[Item]], "Future[list[Answer]]"]


class Verdicts(Future[list[Verdict]]):
    """All verdicts of one call, in its order, when the last one is there."""

    def __init__(self, count: int):
        super().__init__()
        self.verdicts: list[Verdict | None] = [None] * count
        self.missing = count
        if not count:
            self.set_result([])

    def put(self, i: int, verdict: Verdict) -> None:
        self.verdicts[i] = verdict
        self.missing -= 1
        if not self.missing and not self.done():
            self.set_result([v for v in self.verdicts if v is not None])


@dataclass
class Place:
    """An item, and where its verdict goes."""

    item: Item
    verdicts: Verdicts
    index: int
    dealt: int = 0


@dataclass
class Worker:
    name: str
    submit: Submit
    lists: int = 0  # that it is at
    alone: bool = False  # whether it is at a sample that wants to be alone


def room(settings: RewardSettings, ready: dict[str, Any]) -> dict[str, int]:
    """How many samples a worker of such functions is given."""
    if ready["waits"]:
        return {"together": max(1, settings.concurrency // LISTS, settings.batch * ready["batched"]), "lists": LISTS}
    return {"together": settings.batch if ready["batched"] else 1}


class Dispatcher:
    """`together` is how many samples a process judges at once: 1, or more where functions are async or batched."""

    def __init__(self, submits: Mapping[str, Submit], *, together: int = 1, lists: int = 1):
        self.workers = [Worker(name, submit) for name, submit in submits.items()]
        self.together, self.lists = together, lists
        self.waiting: deque[Place] = deque()
        self.pace = 0.001  # seconds per verdict, of late
        self.lock = threading.RLock()

    def judge(self, items: list[Item]) -> Verdicts:
        verdicts = Verdicts(len(items))
        with self.lock:
            self.waiting.extend(Place(item, verdicts, i) for i, item in enumerate(items))
            self.deal()
        return verdicts

    def at_work(self) -> list[str]:
        """The workers that have samples to judge."""
        return [w.name for w in self.workers if w.lists]

    def deal(self) -> None:
        """Gives what is waiting to who has room, the least busy first."""
        while self.waiting:
            free = [w for w in self.workers if w.lists < self.most_lists() and not w.alone]
            alone = self.waiting[0].item.alone
            if alone:
                free = [w for w in free if not w.lists]
            if not free:
                return
            worker = min(free, key=lambda w: w.lists)
            count = 1 if alone else self.length()
            share: list[Place] = []
            while self.waiting and len(share) < count and (alone or not self.waiting[0].item.alone):
                share.append(self.waiting.popleft())
            self.hand(worker, share, alone)

    def most_lists(self) -> int:
        """Two on the way keep a process busy that is done with a list in no time."""
        return max(self.lists, 2 if self.pace * self.length() < LIST_S else 1)

    def length(self) -> int:
        """How many samples make a list."""
        if self.together > 1:
            return self.together
        share = -(-len(self.waiting) // len(self.workers))
        return max(1, min(int(LIST_S / self.pace), share, LONGEST_LIST))

    def hand(self, worker: Worker, share: list[Place], alone: bool) -> None:
        worker.lists += 1
        worker.alone = alone
        began = time.perf_counter()
        for place in share:
            place.dealt += 1
        answers = worker.submit([place.item for place in share])
        answers.add_done_callback(lambda done: self.back(worker, share, time.perf_counter() - began, done))

    def back(self, worker: Worker, share: list[Place], seconds: float, done: "Future[list[Answer]]") -> None:
        with self.lock:
            worker.lists -= 1
            worker.alone = False
            self.pace += 0.2 * (seconds / len(share) - self.pace)
            error = done.exception()
            if error is not None:
                for place in share:
                    if not place.verdicts.done():
                        place.verdicts.set_exception(error)
            else:
                for place, answer in zip(reversed(share), reversed(done.result()), strict=True):
                    self.take(place, answer)
            self.deal()

    def take(self, place: Place, answer: Answer) -> None:
        if isinstance(answer, Verdict):
            place.verdicts.put(place.index, answer)
        elif place.dealt >= TRIES:
            sentence = f"{TRIES} reward processes ended while it waited for its turn"
            place.verdicts.put(place.index, Verdict(None, failure="crash", detail=sentence))
        else:
            place.item = answer
            self.waiting.appendleft(place)
