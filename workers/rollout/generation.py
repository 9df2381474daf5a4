"""One `generate` call on all engines: assigns requests, yields samples, replaces lost and stalled engines.

RequestScheduler ──requests──▶ WorkPool ◀──▶ engines
       ▲                          │ samples, for the driver
       │                          │ an engine died, stalled, or has wrong weights
       └──── its requests ──── replace_engine ──▶ Suspects, after a second loss
"""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from rlsys.errors import NodeLost, WorkerFailed, WorkerLost, WrongWeights
from rlsys.types import Request, Sample
from workers.fleet.cluster import END
from workers.fleet.pool import Line, WorkPool
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import POLL_S, Watchdog
from workers.rollout.request_scheduler import RequestScheduler
from workers.rollout.suspects import Suspects

Key = tuple[str, int]  # uid and index of a sample


class Generation:
    """`for samples in Generation(requests, engines, watchdog, max_running).run(): …`

    While `seconds_to_wait()` is not 0, further requests may be added between two lists of samples. If no sample comes for
    as many seconds, an empty list is yielded.
    """

    def __init__(
        self,
        requests: list[Request],
        engines: ReplaceableWorkers,
        watchdog: Watchdog,
        max_running: int,
        seconds_to_wait: Callable[[], float] = lambda: 0.0,
    ):
        self.engines, self.watchdog = engines, watchdog
        self.scheduler = RequestScheduler(requests, max_running)
        self.pool: WorkPool[Key, Request] = WorkPool(engines, watchdog, "generating", lambda r: r.uid)
        self.suspects = Suspects()
        self.reserved: set[str] = set()  # engines that have suspects, and get no other request until they have none
        self.seconds_to_wait, self.stop_requested, self.stopping = seconds_to_wait, False, False
        self.engine_by_sample: dict[Key, str] = {}  # which engine has the turns of an episode in its cache

    def run(self) -> Iterator[list[Sample]]:
        """Yields samples as they finish, in any order."""
        self.assign_requests()
        while self.pool.busy or self.seconds_to_wait():
            news = self.pool.poll(self.seconds_to_wait() or POLL_S)
            samples = self.accept(*news) if news else []
            if samples or self.seconds_to_wait():
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
        samples: list[Sample] = [s for s in pickle.loads(news) if self.pool.take(line, (s.uid, s.index))]
        self.suspects.acquit([(s.uid, s.index) for s in samples])
        if self.seconds_to_wait():
            self.engine_by_sample.update(((s.uid, s.index), line.worker) for s in samples)
        return samples

    def add(self, request: Request) -> None:
        """Adds a request. The next turn of an episode goes to the engine that has the others in its cache."""
        self.scheduler.add(request, self.engine_by_sample.get((request.uid, request.index), ""))

    def cancel_waiting(self) -> set[Key]:
        """Drops the requests that no engine has. Returns their samples, by uid and index."""
        return {(r.uid, r.index) for r in [*self.scheduler.clear(), *self.suspects.clear()]}

    @property
    def waiting_count(self) -> int:
        """The number of requests that no engine has."""
        return self.scheduler.waiting_count + len(self.suspects)

    def pending_samples(self) -> set[Key]:
        """The samples that engines owe, by uid and index."""
        return {key for requests in self.pool.held.values() for key in requests}

    def wake(self) -> None:
        """Has `run` yield at once. Any thread may call it."""
        self.pool.wake()

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
            running = {name: len(held) for name, held in self.pool.held.items() if self.pool.can_take(name)}
            self.reserved = {name for name in self.reserved if running.get(name, 1)}
            open_to_all = {name: count for name, count in running.items() if name not in self.reserved}
            is_only = len(self.engines.actors) == 1
            for name in [name for name, count in open_to_all.items() if not count]:
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
        items = {(r.uid, r.index): r for r in requests}
        self.pool.open(name, "generate", pickle.dumps(requests), items=items, stream=True)

    def samples_by_engine(self) -> dict[str, int]:
        """Counts the pending samples of each engine, and under "" the requests that wait for one.

        Any thread may call it.
        """
        return {"": self.waiting_count} | {name: len(held) for name, held in self.pool.held.items()}
