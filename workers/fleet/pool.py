"""Owes an answer for every item, whatever happens to the workers. Rollout, episodes and rewards use it.

    open(worker, "generate", …, items={key: item})  ──▶  worker
    poll()  ◀──  what a worker says; or the error that ended it; or that it has said nothing for too long
    take(line, key)          the item is answered
    lose(worker, error)      replaces the worker, and returns the items that it still held

An item waits with the user of the pool, who decides on the order, or is held by one worker, or is answered.
"""

import queue
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlsys.errors import WorkerFailed, WorkerLost
from workers.fleet.cluster import Actor, CallFailed
from workers.fleet.watchdog import POLL_S, StallTimer, Watchdog, explain_failure

Key = TypeVar("Key")
Item = TypeVar("Item")


class Workers(Protocol):
    """`ReplaceableWorkers`, or what stands for them."""

    actors: dict[str, Actor]
    under_way: list[str]  # calls that find out themselves who stalls

    def replace(self, lost: dict[str, WorkerLost], actors: dict[str, Actor]) -> None: ...


@dataclass(eq=False)
class Line(Generic[Key]):
    """A call of one process, or a stream from it."""

    worker: str
    actor: Actor
    missing: dict[Key, None]  # the items that it was opened for, in order, without those that are answered


class WorkPool(Generic[Key, Item]):
    """`doing` and `uid` are for errors: what the workers do, and the prompt of an item.

    A worker that is lost `max_lost` times without an answer in between ends the run.
    """

    def __init__(
        self,
        workers: Workers,
        watchdog: Watchdog,
        doing: str,
        uid: Callable[[Item], str] | None = None,
        max_lost: int = 10,
    ):
        self.workers, self.watchdog, self.doing, self.uid, self.max_lost = workers, watchdog, doing, uid, max_lost
        self.lost_in_a_row: Counter[str] = Counter()
        self.held: dict[str, dict[Key, Item]] = {name: {} for name in workers.actors}
        self.timers: dict[str, StallTimer] = {name: watchdog.start_timer() for name in workers.actors}
        self.actors: dict[str, Actor] = {}  # that hold the items; another thread may have replaced one since
        self.inbox = watchdog.threads.queue()
        self.on_arrival: Callable[[], object] = lambda: None  # called on any thread

    @property
    def busy(self) -> list[str]:
        """The workers that owe an answer."""
        return [name for name, items in self.held.items() if items]

    def can_take(self, worker: str) -> bool:
        """False while a lost process of this worker, which another thread has replaced, still holds items."""
        return not self.held[worker] or self.actors[worker] is self.workers.actors[worker]

    def give(self, worker: str, items: Mapping[Key, Item]) -> Actor:
        """From now on the worker holds these items. Returns its actor."""
        if not self.held[worker]:
            self.actors[worker] = self.workers.actors[worker]
            self.timers[worker].reset()
        self.held[worker] |= items
        return self.actors[worker]

    def open(
        self, worker: str, method: str, *arguments: Any, items: Mapping[Key, Item] | None = None, stream: bool = False
    ) -> Line[Key]:
        """Calls the worker with items. `poll` returns the answer, or each answer of a stream and `END`.

        The worker does not hold them if the call cannot be made, because an argument cannot be sent.
        """
        line = Line[Key](worker, self.give(worker, items or {}), dict.fromkeys(items or ()))
        call = self.watchdog.cluster.stream if stream else self.watchdog.cluster.ask
        try:
            call(line.actor, method, *arguments, receive=lambda news: self.receive(line, news))
        except Exception:
            for key in line.missing:
                del self.held[worker][key]
            raise
        return line

    def receive(self, line: Line[Key], news: Any) -> None:
        """Runs on any thread."""
        self.inbox.put((line, news))
        self.on_arrival()

    def wake(self) -> None:
        """Has `poll` return at once. Any thread may call it."""
        self.inbox.put(None)

    def poll(self, timeout_s: float = POLL_S) -> tuple[Line[Key], Any] | None:
        """Returns what comes next: an answer, `END`, or an exception. None after `wake` and after `timeout_s`.

        Raises `StepAbandoned` if the run is ending.
        """
        while True:
            self.watchdog.stop.raise_if_stopped()
            if self.inbox.empty() and (stalled := self.find_stalled()):
                return stalled
            try:
                arrival = self.inbox.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                return None
            if arrival is None:
                return None
            line, news = arrival
            if self.actors.get(line.worker) is line.actor:  # else it was replaced
                self.timers[line.worker].reset()
                if isinstance(news, CallFailed):
                    news = explain_failure(news, line.worker, self.doing, self.watchdog.logs)
                elif not isinstance(news, Exception):
                    self.lost_in_a_row[line.worker] = 0
                return line, news

    def find_stalled(self) -> tuple[Line[Key], Exception] | None:
        if self.workers.under_way:  # a worker that has answered it may wait for another: for its weights
            self.reset_timers()
        for name in self.busy:
            if waited := self.timers[name].expired():
                uids = list(dict.fromkeys(map(self.uid, self.held[name].values()))) if self.uid else None
                error = self.watchdog.report_stall([name], self.doing, waited, uids)
                return Line(name, self.actors[name], dict.fromkeys(self.held[name])), error
        return None

    def take(self, line: Line[Key], key: Key) -> Item | None:
        """Marks an item as answered. None if this line has answered it before, or was never asked."""
        if key not in line.missing:
            return None
        del line.missing[key]
        return self.held[line.worker].pop(key)

    def lose(self, worker: str) -> dict[Key, Item]:
        """Forgets the worker's process. Returns the items that it held. `replace` comes next."""
        items, self.held[worker] = self.held[worker], {}
        return items

    def replace(self, worker: str, error: WorkerLost, cause: str = "") -> None:
        """Replaces a worker, unless another thread has done it already. Raises if there is a `cause` that would repeat."""
        self.lost_in_a_row[worker] += 1
        if self.lost_in_a_row[worker] == self.max_lost and not cause:
            cause = f"{worker} was lost {self.max_lost} times without an answer in between: look at its machine"
        if cause:
            sentence, _, log = str(error).partition("\n")
            raise WorkerLost(f"{sentence}; {cause}.\n{log}") from error
        self.workers.replace({worker: error}, {worker: self.actors.pop(worker)})
        self.reset_timers()

    def reset_timers(self) -> None:
        """Called when nothing was read for a while."""
        for timer in self.timers.values():
            timer.reset()

    def require_debtor(self, waiting: str) -> None:
        """Raises an error where `poll` would never end: something waits, and no worker owes an answer."""
        if waiting and not self.busy and self.inbox.empty():
            raise WorkerFailed(
                f"{self.doing}: {waiting}, and no worker owes an answer. This is a defect of rlsys, please report it; the "
                "same command resumes the run."
            )
