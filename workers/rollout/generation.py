"""One `generate` call on all engines: assigns requests, yields samples, replaces lost and stalled engines.

RequestScheduler ──requests──▶ WorkPool ◀──▶ engines
       ▲                          │ samples, for the driver
       │                          │ an engine died, stalled, or has wrong weights
       └──── its requests ──── replace_engine ──▶ Suspects, after a second loss
"""

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlsys.errors import NodeLost, WorkerFailed, WorkerLost, WrongWeights
from rlsys.types import Request, Sample
from workers.fleet.cluster import END
from workers.fleet.pool import Line, WorkPool
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.rollout.request_scheduler import RequestScheduler
from workers.rollout.suspects import Suspects
from workers.turns.engine_episodes import Progress
from workers.turns.pool import LostLife

Key = tuple[str, int, int]  # of a request, and of its sample


class Generation:
    """`for samples in Generation(requests, engines, watchdog, max_running, replace).run(): …`

    An episode is a request as others are: the engine that has it plays it. `replace_episode_workers` is called with those
    that engines find lost.
    """

    def __init__(
        self,
        requests: list[Request],
        engines: ReplaceableWorkers,
        watchdog: Watchdog,
        max_running: int,
        replace_episode_workers: Callable[[Iterable[LostLife]], None] = lambda lost: None,
    ):
        self.engines, self.watchdog = engines, watchdog
        self.scheduler = RequestScheduler(requests, max_running)
        self.pool: WorkPool[Key, Request] = WorkPool(engines, watchdog, "generating", lambda r: r.uid)
        self.suspects = Suspects()
        self.reserved: set[str] = set()  # engines that have suspects, and get no other request until they have none
        self.between_turns = Counter[str]()  # episodes, by engine: as many others may run there meanwhile
        self.replace_episode_workers, self.stop_requested, self.stopping = replace_episode_workers, False, False

    def run(self) -> Iterator[list[Sample]]:
        """Yields samples as they finish, in any order."""
        self.assign_requests()
        while self.pool.busy:
            news = self.pool.poll()
            if samples := self.accept(*news) if news else []:
                yield samples
            if self.stop_requested and (not news or not self.stopping):
                self.cancel_waiting()
                self.tell_to_stop()
            self.assign_requests()

    def accept(self, line: Line[Key], news: Any) -> list[Sample]:
        """Returns the samples that an engine still owed. Replaces it if it is lost."""
        if isinstance(news, WorkerLost):
            self.replace_engine(line.worker, news)
            return []
        if isinstance(news, Exception):
            raise news
        if news is END:
            if line.missing:
                log = self.watchdog.logs / f"{line.worker}.log"
                raise WorkerFailed(f"generating: {line.worker} ended {len(line.missing)} samples short. Its log: {log}")
            return []
        answer = pickle.loads(news)
        if isinstance(answer, Progress):
            answer = self.read_progress(line.worker, answer)
        samples: list[Sample] = [s for s in answer if self.pool.take(line, s.key)]
        self.suspects.acquit([s.key for s in samples])
        return samples

    def read_progress(self, engine: str, progress: Progress) -> list[Sample]:
        self.between_turns[engine] = progress.between_turns
        for kind, facts in progress.events:
            self.watchdog.event(kind, **facts)
        for note in progress.notes:
            self.watchdog.note(note)
        if progress.error:
            raise progress.error
        if progress.lost:
            self.replace_episode_workers(progress.lost)
            self.pool.reset_timers()
        return progress.finished

    def cancel_waiting(self) -> None:
        """Drops the requests that no engine has."""
        self.scheduler.clear()
        self.suspects.clear()

    @property
    def waiting_count(self) -> int:
        """The number of requests that no engine has."""
        return self.scheduler.waiting_count + len(self.suspects)

    def stop_early(self) -> None:
        """Ends the run early: pending samples come unfinished or not at all. Called between two lists of samples."""
        self.stop_requested = True

    def tell_to_stop(self) -> None:
        """Has engines return unfinished samples as they are. Again and again: one may have been told before its requests came."""
        self.stopping = True
        for name in self.pool.busy:
            self.watchdog.cluster.tell(self.pool.actors[name], "stop_early")

    def replace_engine(self, name: str, error: WorkerLost) -> None:
        """Replaces an engine that died, stalled or has wrong weights, and retries its pending requests."""
        if isinstance(error, WrongWeights):
            self.watchdog.event("wrong weights", worker=name, cause=str(error))
        pending = self.pool.lose(name)
        self.between_turns[name] = 0
        requests, cause = list(pending.values()), ""
        if not isinstance(error, WrongWeights | NodeLost):  # no sample has a part in these
            requests = self.suspects.add(name, pending)
            cause = self.suspects.describe_cause()
        self.scheduler.requeue(requests)
        if self.stop_requested:
            self.cancel_waiting()
        self.pool.replace(name, error, cause)

    def assign_requests(self) -> None:
        """Gives waiting requests to engines with room. While weights are sent, engines get no further requests."""
        if not self.waiting_count:
            return
        if not self.engines.lock.acquire(blocking=not self.pool.busy):
            return  # tried again after the next samples
        try:
            held = {name: len(items) for name, items in self.pool.held.items() if self.pool.can_take(name)}
            self.reserved = {name for name in self.reserved if held.get(name, 1)}
            is_only = len(self.engines.actors) == 1
            open_to_all = {
                n: max(count - self.between_turns[n], 0) for n, count in held.items() if n not in self.reserved
            }
            for name in [name for name in open_to_all if not held[name]]:
                if part := self.suspects.take(name, is_only):
                    self.reserved.add(name)
                    del open_to_all[name]
                    self.send(name, part)
            if takers := self.suspects.takers(open_to_all, is_only):  # one of them gets no more, until it is idle
                del open_to_all[min(takers, key=open_to_all.__getitem__)]
            for name, requests in self.scheduler.assign(open_to_all).items():
                self.send(name, requests)
        finally:
            self.engines.lock.release()
        if not self.stop_requested:
            self.pool.require_debtor(f"{self.waiting_count} requests wait" if self.waiting_count else "")

    def send(self, name: str, requests: list[Request]) -> None:
        for method, is_episode in (("generate", False), ("play", True)):
            if items := {r.key: r for r in requests if (r.prompt is not None) == is_episode}:
                self.pool.open(name, method, pickle.dumps([*items.values()]), items=items, stream=True)

    def samples_by_engine(self) -> dict[str, int]:
        """Counts the pending samples of each engine, and under "" the requests that wait for one.

        Any thread may call it.
        """
        return {"": self.waiting_count} | {name: len(held) for name, held in self.pool.held.items()}
