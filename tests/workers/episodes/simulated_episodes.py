"""Episodes without Ray, processes and engines, in an order that a seed decides.

EpisodeRollout, EpisodePool and EpisodeRunner are the real ones. Plays, engines and the way of messages are simulated:
messages are late, processes crash or retire, workers are lost, runs stop early. Plays are as bad as they may be: what they
ask, and when they end, is another thing each time. Each end tells what its play has seen.
"""

import pickle
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlsys.types import Request, Sample, join_partial
from workers.episodes.messages import Event
from workers.episodes.pool import EpisodePool
from workers.episodes.runner import EpisodeRunner
from workers.fleet.cluster import CallFailed, Receive
from workers.fleet.watchdog import Watchdog

Seen = list[tuple[list[int], list[int]]]  # an observation, and the turn after it
MAX_TURNS, MAX_ROUNDS = 6, 20_000


class World:
    """Plays, processes, workers and engines of one seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(f"episodes {seed}")
        self.workers: dict[str, Worker] = {}
        self.last_seen: dict[int, Seen] = {}  # by episode: what its last play got
        self.sampled: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()  # all before a turn, and the turn
        self.faults = self.rng.randint(0, 5)
        self.engines = Engines(self)
        self.pool = make_pool(self.rng.randint(1, 2), self.spawn)

    def spawn(self, name: str) -> "Worker":
        self.workers[name] = Worker(self, name)
        return self.workers[name]

    def advance(self) -> None:
        """Lets one thing happen, of all that may."""
        worker = self.rng.choice(list(self.workers.values()))
        self.rng.choice([worker.receive, worker.play, worker.play, worker.report, self.engines.advance])()
        if self.faults and self.rng.random() < 0.02:
            self.faults -= 1
            self.rng.choice([worker.crash, worker.retire, worker.end_by_deadline, worker.die])()
        assert worker.runner.working <= set(worker.runner.playing.values()), "others have no deadline"

    def settle(self) -> None:
        """Delivers all messages to the workers."""
        for worker in self.workers.values():
            while worker.inbox:
                worker.receive()


def quiet_watchdog() -> Watchdog:
    return Watchdog(Path("/nonexistent"), note=lambda text: None, cluster=ObjectCluster())  # type: ignore[arg-type]


class ObjectCluster:
    """Actors are objects: `events` has what receives an actor's events, and `inbox` what the driver has sent."""

    def stream(self, actor: Any, method: str, receive: Receive) -> None:
        actor.events = receive

    def tell(self, actor: Any, method: str, commands: bytes) -> None:
        actor.inbox.append(commands)

    def kill(self, actor: Any) -> None: ...


def make_pool(count: int, spawn: Callable[[str], Any]) -> EpisodePool:
    """The real pool, with simulated actors."""
    config: Any = SimpleNamespace(episode=SimpleNamespace(workers=count))
    pool = EpisodePool(config, spawn, quiet_watchdog())
    for name in pool.workers.actors:
        pool.pool.open(name, "events", stream=True)
    return pool


class Worker:
    """An actor around a runner. What the driver sends arrives later, in order."""

    events: Receive

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.inbox: deque[bytes] = deque()
        self.runner = Runner(world)

    def receive(self) -> None:
        if self.inbox:
            self.runner.send(pickle.loads(self.inbox.popleft()))

    def play(self) -> None:
        self.runner.process.advance(self.runner)

    def report(self) -> None:
        events: list[Event] = []
        while not self.runner.events_queue.empty():
            events.append(self.runner.events_queue.get())  # type: ignore[arg-type]
        if events:
            self.events(pickle.dumps(events))

    def crash(self) -> None:
        self.runner.replace_process("crash")
        self.runner.send_work()

    def retire(self) -> None:
        self.runner.replace_process("retired")
        self.runner.send_work()

    def end_by_deadline(self) -> None:
        """One episode blocks, and its process is killed."""
        if working := [p.start.number for p in self.runner.working]:
            self.runner.running = self.world.rng.choice(sorted(working))
            self.runner.replace_process("timeout")
            self.runner.send_work()

    def die(self) -> None:
        self.events(CallFailed(f"{self.name} died"))


class Runner(EpisodeRunner):
    """The real runner, without a thread of its own."""

    process: Any

    def __init__(self, world: World):
        self.world = world
        concurrency = world.rng.choice([1, 3, 50])
        self.limits = SimpleNamespace(concurrency=concurrency, step_timeout_s=1e9, timeout_s=1e9)  # type: ignore[assignment]
        self.settings = SimpleNamespace(keep_spare=False)  # type: ignore[assignment]
        self.commands, self.waiting = deque(), deque()
        self.playing, self.working, self.dropped, self.outgoing = {}, set(), {}, []
        self.running, self.spare, self.started, self.ended = None, None, False, False
        self.events_queue = queue.SimpleQueue()
        self.poller = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
        self.process = self.start_process()

    def start_process(self) -> Any:
        return Process(self.world)

    def send(self, commands: Any) -> None:
        super().send(commands)
        self.send_work()


class Process:
    """Plays `row["play"]`: `same` is a function of the turns, `moody` of the mood of its process too."""

    def __init__(self, world: World):
        self.ready_info: dict[str, Any] = {}
        self.world, self.mood = world, world.rng.random()
        self.rows: dict[int, Any] = {}
        self.seen: dict[int, Seen] = {}
        self.asks: dict[int, list[int]] = {}  # observations whose turns episodes wait for
        self.ready: list[int] = []  # episodes that go on
        self.dropped: list[int] = []  # that take their time to end

    def send(self, messages: list[tuple[Any, ...]]) -> None:
        for kind, number, *rest in messages:
            if kind == "start":
                self.rows[number], self.seen[number] = pickle.loads(rest[1]), []
                self.world.last_seen[number] = self.seen[number]
                self.ready.append(number)
            elif kind == "turn" and number in self.asks:
                self.seen[number].append((self.asks.pop(number), rest[0]))
                self.ready.append(number)
            elif kind == "drop":
                self.forget(number)
                self.dropped.append(number)

    def kill(self) -> str:
        return "killed"

    def forget(self, number: int) -> None:
        self.rows.pop(number, None)
        self.asks.pop(number, None)
        self.ready = [n for n in self.ready if n != number]

    def advance(self, runner: Runner) -> None:
        rng = self.world.rng
        if self.dropped and rng.random() < 0.2:
            runner.on_message(self, {"dropped": self.dropped.pop()})  # type: ignore[arg-type]
        impatient = [n for n in self.asks if self.rows[n]["play"] == "moody"]
        if impatient and rng.random() < 0.05:  # it cancels its ask, and ends
            self.end(runner, rng.choice(impatient), 1.0)
        elif self.ready:
            number = self.ready.pop(rng.randrange(len(self.ready)))
            runner.on_message(self, {"on": number})  # type: ignore[arg-type]
            self.step(runner, number)
        runner.send_work()

    def step(self, runner: Runner, number: int) -> None:
        row, seen = self.rows[number], self.seen[number]
        mood = random.Random(f"{row['seed']} {seen} {self.mood if row['play'] == 'moody' else ''}")
        choice = mood.random()
        if len(seen) == MAX_TURNS or choice < 0.3:
            self.end(runner, number, None if choice < 0.05 else float(len(seen)))
        else:
            self.asks[number] = [mood.choice([7, 8])]
            runner.on_message(self, {"ask": number, "observation": self.asks[number], "max_tokens": 8})  # type: ignore[arg-type]

    def end(self, runner: Runner, number: int, score: float | None) -> None:
        seen = self.seen[number]
        failure = "" if score is not None and seen else "invalid"
        verdict = {"score": None if failure else score, "failure": failure}
        scores = [float(sum(turn)) for _, turn in seen]
        end = {"end": number, "turns": len(seen), "finish": "stop", "verdict": verdict}
        runner.on_message(self, end | {"messages": seen.copy(), "turn_scores": scores})  # type: ignore[arg-type]
        self.forget(number)


class Engines:
    """Stand for the engines, and for a `Generation` of theirs. What they write is random, and noted."""

    def __init__(self, world: World):
        self.world = world

    def begin(self, requests: list[Request], more: Callable[[], float]) -> "Engines":
        self.waiting, self.more = list(requests), more
        self.running: list[Request] = []
        self.finished: list[Sample] = []
        self.stop_requested = self.stopping = False
        return self

    @property
    def waiting_count(self) -> int:
        return len(self.waiting)

    def pending_samples(self) -> set[tuple[str, int]]:
        return {(r.uid, r.index) for r in [*self.running, *self.finished]}

    def run(self) -> Iterator[list[Sample]]:
        for _ in range(MAX_ROUNDS):
            if not (self.running or self.waiting or self.finished or self.more()):
                return
            self.world.advance()
            finished, self.finished = self.finished, []
            yield finished
            if self.stop_requested and not self.stopping:
                self.waiting, self.stopping = [], True
        raise AssertionError("nobody owes anything, and episodes are open")

    def add(self, request: Request) -> None:
        assert not any(r.uid == request.uid and r.index == request.index for r in (*self.waiting, *self.running))
        self.waiting.append(request)

    def cancel_waiting(self) -> set[tuple[str, int]]:
        waiting, self.waiting = self.waiting, []
        return {(r.uid, r.index) for r in waiting}

    def stop_early(self) -> None:
        self.stop_requested = True

    def wake(self) -> None:
        pass

    def advance(self) -> None:
        rng = self.world.rng
        while self.waiting and rng.random() < 0.7:
            self.running.append(self.waiting.pop(0))
        if (
            self.stopping and self.running and rng.random() < 0.05
        ):  # an engine is lost, and its turns are not sampled again
            self.running.pop()
        if self.running:
            self.finished.append(self.write(self.running.pop(rng.randrange(len(self.running)))))

    def write(self, request: Request) -> Sample:
        rng = self.world.rng
        new = [rng.randrange(10, 99) for _ in range(rng.randint(0, 2) if self.stopping else rng.randint(1, 3))]
        tokens, logprobs = np.array(new, dtype=np.int32), np.zeros(len(new), dtype=np.float32)
        finish = "cut" if (self.stopping and rng.random() < 0.7) or not new else "stop"
        rest = Sample(request.uid, request.index, "", tokens, logprobs, finish, 0)
        sample = join_partial(request.partial, rest) if request.partial else rest
        self.world.sampled.add((tuple(request.tokens), tuple(sample.tokens.tolist())))
        if request.partial:
            assert (tuple(request.tokens), tuple(request.partial.tokens.tolist())) in self.world.sampled
        return sample
