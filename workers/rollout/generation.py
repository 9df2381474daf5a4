"""One `generate` call on all engines: assigns requests, yields samples, replaces lost and stalled engines.

RequestScheduler ──requests──▶ engines ──▶ EngineStreams ──▶ samples, for the driver
       ▲                                        │ an engine died, stalled, or has wrong weights
       └────── its pending requests ────── replace_engine ──▶ Suspects, after a second loss
"""

from collections import Counter
from collections.abc import Callable, Iterator

from rlsys.errors import NodeLost, WorkerLost, WrongWeights
from rlsys.types import Request, Sample
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import POLL_S, Watchdog
from workers.rollout.engine_streams import EngineStreams
from workers.rollout.request_scheduler import RequestScheduler
from workers.rollout.suspects import Suspects

MAX_LOST_IN_A_ROW = 10  # processes of an engine, without a sample; one that ends engines is found sooner


class Generation:
    """`for samples in Generation(requests, engines, watchdog, max_running).run(): …`

    While `more()` is not 0, further requests may be added between two lists of samples. If no sample comes for as many
    seconds as it returns, an empty list is yielded.
    """

    def __init__(
        self,
        requests: list[Request],
        engines: ReplaceableWorkers,
        watchdog: Watchdog,
        max_running: int,
        more: Callable[[], float] = lambda: 0.0,
    ):
        self.engines, self.watchdog = engines, watchdog
        self.scheduler = RequestScheduler(requests, max_running)
        self.streams = EngineStreams(watchdog)
        self.suspects = Suspects()
        self.lost_in_a_row: Counter[str] = Counter()  # by engine
        self.reserved: set[str] = set()  # engines that have suspects, and get no other request until they have none
        self.more, self.stop_requested = more, False
        self.engine_by_sample: dict[tuple[str, int], str] = {}  # which engine has the turns of an episode in its cache

    def run(self) -> Iterator[list[Sample]]:
        """Yields samples as they finish, in any order."""
        self.assign_requests()
        while self.streams.pending_engines or self.more():
            name, samples = self.streams.next(self.more() or POLL_S)
            if isinstance(samples, WorkerLost):
                self.replace_engine(name, samples)
            elif isinstance(samples, Exception):
                raise samples
            elif samples or self.more():
                if samples:
                    self.lost_in_a_row[name] = 0
                self.suspects.acquit([(s.uid, s.index) for s in samples])
                if self.more():
                    self.engine_by_sample.update(((s.uid, s.index), name) for s in samples)
                yield samples
                if self.stop_requested and not self.streams.stopping:
                    self.cancel_waiting()
                    self.streams.stop_early()
            self.assign_requests()

    def add(self, request: Request) -> None:
        """Adds a request. The next turn of an episode goes to the engine that has the others in its cache."""
        self.scheduler.add(request, self.engine_by_sample.get((request.uid, request.index), ""))

    def cancel_waiting(self) -> set[tuple[str, int]]:
        """Drops the requests that no engine has. Returns their samples, by uid and index."""
        return {(r.uid, r.index) for r in [*self.scheduler.clear(), *self.suspects.clear()]}

    @property
    def waiting_count(self) -> int:
        """The number of requests that no engine has."""
        return self.scheduler.waiting_count + len(self.suspects)

    def pending_samples(self) -> set[tuple[str, int]]:
        """The samples that engines owe, by uid and index."""
        return {key for requests in self.streams.pending.values() for key in requests}

    def wake(self) -> None:
        """Has `run` yield at once. Any thread may call it."""
        self.streams.wake()

    def stop_early(self) -> None:
        """Ends the run early: pending samples come unfinished or not at all. Called between two lists of samples."""
        self.stop_requested = True

    def replace_engine(self, name: str, error: WorkerLost) -> None:
        """Replaces an engine that died, stalled or has wrong weights, and retries its pending requests."""
        if isinstance(error, WrongWeights):
            self.watchdog.event("wrong weights", worker=name, cause=str(error))
        actor, pending = self.streams.remove(name)
        requests, cause = list(pending.values()), ""
        if not isinstance(error, WrongWeights | NodeLost):  # no sample has a part in these
            requests = self.suspects.add(name, pending)
            cause = self.suspects.describe_cause()
        self.lost_in_a_row[name] += 1
        if self.lost_in_a_row[name] == MAX_LOST_IN_A_ROW:
            cause = (
                cause or f"{name} was lost {MAX_LOST_IN_A_ROW} times without a sample in between: look at its machine"
            )
        if cause:
            sentence, _, log = str(error).partition("\n")
            raise WorkerLost(f"{sentence}; {cause}.\n{log}") from error
        self.scheduler.requeue(requests)
        if self.stop_requested:
            self.cancel_waiting()
        self.engines.replace({name: error}, {name: actor})
        self.streams.reset_timers()

    def assign_requests(self) -> None:
        """Gives waiting requests to engines with room. While weights are sent, engines get no further requests."""
        if not self.waiting_count:
            return
        if not self.engines.lock.acquire(blocking=not self.streams.pending_engines):
            return  # tried again after the next samples
        try:
            running = {
                name: len(pending)
                for name, actor in self.engines.actors.items()
                if not (pending := self.streams.pending.get(name, {})) or self.streams.actors[name] is actor
            }
            self.reserved = {name for name in self.reserved if running.get(name, 1)}
            open_to_all = {name: count for name, count in running.items() if name not in self.reserved}
            is_only = len(self.engines.actors) == 1
            for name in [name for name, count in open_to_all.items() if not count]:
                if part := self.suspects.take(name, is_only):
                    self.reserved.add(name)
                    del open_to_all[name]
                    self.streams.open(name, self.engines.actors[name], part)
            if takers := self.suspects.takers(open_to_all, is_only):  # one of them gets no more, until it is idle
                del open_to_all[min(takers, key=open_to_all.__getitem__)]
            for name, requests in self.scheduler.assign(open_to_all).items():
                self.streams.open(name, self.engines.actors[name], requests)
        finally:
            self.engines.lock.release()

    def samples_by_engine(self) -> dict[str, int]:
        """Counts the pending samples of each engine, and under "" the requests that wait for one.

        Any thread may call it.
        """
        waiting, pending = self.waiting_count, self.streams.pending.copy()
        return {"": waiting} | {name: len(pending.get(name, ())) for name in self.engines.actors.copy()}
