"""Reads the samples that engines stream back, and notices an engine that is lost or stalled.

Each `generate` call on an engine is one stream of object references. A thread per stream puts what arrives into one
queue, and `next()` takes it out. An engine may have several streams at a time.
"""

import pickle
import queue
import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from rlsys.errors import WorkerFailed
from rlsys.types import Request, Sample
from workers.fleet.watchdog import POLL_S, StallTimer, Watchdog, explain_failure

Key = tuple[str, int]  # uid and index of a sample


@dataclass(eq=False)
class Stream:
    """One `generate` call."""

    engine: str
    actor: Any
    missing: set[Key]  # samples that have not arrived


Arrival = tuple[Stream, list[Sample] | Exception | None]  # None: the stream has ended
WAKE_UP: Arrival = (Stream("", None, set()), [])


class EngineStreams:
    """`open` starts a stream, `next` returns what arrives first on any of them. Each sample is returned once."""

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog
        self.actors: dict[str, Any] = {}  # by engine; what a replaced actor still sends is ignored
        self.pending: dict[str, dict[Key, Request]] = {}  # by engine: requests without a sample yet
        self.timers: dict[str, StallTimer] = {}
        self.stopping = False
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.deferred: Arrival | None = None  # arrived when another engine had stalled

    @property
    def pending_engines(self) -> list[str]:
        return [name for name, requests in self.pending.items() if requests]

    def open(self, name: str, actor: Any, requests: list[Request]) -> None:
        """Asks an engine for the samples of these requests."""
        if not self.pending.get(name):
            self.actors[name], self.pending[name], self.timers[name] = actor, {}, self.watchdog.start_timer()
        by_key = {(r.uid, r.index): r for r in requests}
        self.pending[name] |= by_key
        refs = actor.generate.options(num_returns="streaming").remote(pickle.dumps(requests))
        stream = Stream(name, actor, set(by_key))
        threading.Thread(target=self.read, args=(stream, refs), daemon=True).start()

    def read(self, stream: Stream, refs: Any) -> None:
        """Puts the samples of a stream into the queue, its end or its error last. Runs in a thread of its own."""
        try:
            for ref in refs:
                self.arrivals.put((stream, pickle.loads(ray.get(ref))))
            self.arrivals.put((stream, None))
        except RayError as error:
            self.arrivals.put((stream, explain_failure(error, stream.engine, "generating", self.watchdog.logs)))
        except Exception as error:
            self.arrivals.put((stream, error))

    def wake(self) -> None:
        """Has `next` return at once, without samples. Any thread may call it."""
        self.arrivals.put(WAKE_UP)

    def stop_early(self) -> None:
        """Has every engine return its unfinished samples as they are."""
        self.stopping = True
        for name in self.pending_engines:
            self.actors[name].stop_early.remote()

    def remove(self, name: str) -> tuple[Any, dict[Key, Request]]:
        """Forgets a lost engine. Returns its actor and its pending requests."""
        return self.actors.pop(name), self.pending.pop(name)

    def next(self, timeout_s: float = POLL_S) -> tuple[str, list[Sample] | Exception]:
        """Returns an engine's name with its new samples, or with the error that ended it.

        A stalled engine is returned as an error even while others keep sending. After `wake`, without a pending engine, and
        after a `timeout_s` of its own, there may be no name and no samples.
        """
        while True:
            arrival: Arrival | None
            try:
                arrival, self.deferred = self.deferred or self.arrivals.get(timeout=timeout_s), None
            except queue.Empty:
                arrival = None if self.pending_engines and timeout_s == POLL_S else WAKE_UP
                if self.stopping:  # an engine may have handled the last stop before this `generate`
                    self.stop_early()
            stream = arrival[0] if arrival else WAKE_UP[0]
            current = stream.actor is not None and self.actors.get(stream.engine) is stream.actor
            if current:
                self.timers[stream.engine].reset()
            if stalled := self.stalled_engine():
                self.deferred = arrival
                return stalled
            if arrival and (current or arrival is WAKE_UP):
                news = arrival[1]
                return stream.engine, news if isinstance(news, Exception) else self.accept(stream, news)

    def stalled_engine(self) -> tuple[str, Exception] | None:
        """Returns a pending engine that has sent nothing for too long, and the error.

        Raises `StepAbandoned` if the run is ending.
        """
        for name in self.pending_engines:
            if waited := self.timers[name].expired():
                uids = list(dict.fromkeys(uid for uid, _ in self.pending[name]))
                return name, self.watchdog.report_stall([name], "generating", waited, uids)
        return None

    def reset_timers(self) -> None:
        """Restarts the stall timers after a time in which nothing was read."""
        for timer in self.timers.values():
            timer.reset()

    def accept(self, stream: Stream, samples: list[Sample] | None) -> list[Sample] | Exception:
        """Returns the samples that were still pending.

        `None` marks the end of a stream, an error if its samples are incomplete.
        """
        if samples is None:
            log = self.watchdog.logs / f"{stream.engine}.log"
            count = len(stream.missing)
            return (
                WorkerFailed(f"generating: {stream.engine} ended {count} samples short. Its log: {log}")
                if count
                else []
            )
        arrived = [s for s in samples if (s.uid, s.index) in stream.missing]
        for key in [(s.uid, s.index) for s in arrived]:
            stream.missing.discard(key)
            del self.pending[stream.engine][key]
        return arrived
