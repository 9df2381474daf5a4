"""Episodes without Ray, processes and engines, in an order that a seed decides.

TurnLoop, EpisodePool and EpisodeRunner are the real ones. Plays, engines and the way of messages are simulated:
messages are late, processes crash or retire, workers are lost, runs stop early. Plays are as bad as they may be: what they
ask, which turn that continues, and when they end, is another thing each time. Each end tells what its play has seen.
"""

import pickle
import queue
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlsys.seeds import derive_seed
from rlsys.types import Request, Sample, join_partial
from workers.episodes.runner import EpisodeRunner
from workers.fleet.cluster import CallFailed, Receive
from workers.fleet.watchdog import Watchdog
from workers.turns.messages import Event
from workers.turns.pool import EpisodePool, Life, LostLife

Seen = list[tuple[list[int], int, list[int]]]  # an observation, the turn that it continues, and the turn after it
MAX_TURNS, MAX_ROUNDS = 6, 20_000


class World:
    """Plays, processes, workers and engines of one seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(f"episodes {seed}")
        self.workers: dict[str, Worker] = {}
        self.last_turns: dict[int, list[Turn]] = {}  # by play: what it has asked for
        self.sampled: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()  # all before a turn, and the turn
        self.faults = self.rng.randint(0, 5)
        self.lost: list[LostLife] = []  # that the driver has not replaced yet
        self.engines = Engines(self)
        names = [f"episode-{i}" for i in range(self.rng.randint(1, 2))]
        self.pool = EpisodePool("rollout-0", 0, {name: Life(0, self.spawn(name)) for name in names}, quiet_watchdog())

    def spawn(self, name: str) -> "Worker":
        self.workers[name] = Worker(self, name)
        return self.workers[name]

    def advance(self) -> None:
        """Lets one thing happen, of all that may."""
        self.lost += self.pool.take_lost()
        if self.lost and self.rng.random() < 0.2:
            self.replace_lost()
        worker = self.rng.choice(list(self.workers.values()))
        self.rng.choice([worker.receive, worker.play, worker.play, worker.report, self.engines.advance])()
        if self.faults and self.rng.random() < 0.02:
            self.faults -= 1
            self.rng.choice([worker.crash, worker.retire, worker.end_by_deadline, worker.die])()
        assert worker.runner.working <= set(worker.runner.playing.values()), "others have no deadline"

    def replace_lost(self) -> None:
        for life in self.lost:
            self.pool.use({life.worker: Life(life.number + 1, self.spawn(life.worker))})
        self.lost = []

    def settle(self) -> None:
        """Delivers all messages to the workers."""
        for worker in self.workers.values():
            while worker.inbox:
                worker.receive()


def seen_turns(sample: Sample) -> Seen:
    """What the environment said before each turn, the turn that this continues, and the turn."""
    if not len(sample.tokens):
        return []
    turns = zip(sample.turns, sample.continued_turns, strict=True)
    return [(observation.tolist(), after, own.tolist()) for (observation, own), after in turns]


def quiet_watchdog() -> Watchdog:
    return Watchdog(Path("/nonexistent"), note=lambda text: None, cluster=ObjectCluster())  # type: ignore[arg-type]


class ObjectCluster:
    """Actors are objects: `events` has what receives an actor's events, and `inbox` what the engine has sent."""

    def stream(self, actor: Any, method: str, line: int, receive: Receive) -> None:
        actor.events = receive

    def tell(self, actor: Any, method: str, *arguments: Any) -> None:
        actor.inbox.append((method, arguments))

    def kill(self, actor: Any) -> None: ...


class Worker:
    """An actor around a runner. What the engine sends arrives later, in order."""

    events: Receive

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.inbox: deque[tuple[str, Any]] = deque()
        self.runner = Runner(world)

    def receive(self) -> None:
        if self.inbox:
            method, arguments = self.inbox.popleft()
            if method == "begin_line":
                self.runner.begin_line(*arguments)
            else:
                self.runner.send(pickle.loads(*arguments))

    def play(self) -> None:
        self.runner.process.advance(self.runner)

    def report(self) -> None:
        events: list[Event] = []
        arrived = self.runner.events_of[0]
        while not arrived.empty():
            events.append(arrived.get())  # type: ignore[arg-type]
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
        self.reports, self.lines, self.events_of = 0, {}, defaultdict(queue.SimpleQueue)
        self.ended_lines = set()
        self.poller = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
        self.process = self.start_process()

    def start_process(self) -> Any:
        return Process(self.world)

    def send(self, commands: Any) -> None:
        super().send(commands)
        self.send_work()


class Process:
    """Plays `row["play"]`: `same` is a function of the turns, `moody` of the mood of its process too, and `program` asks for several
    turns at a time, which are functions of those that they continue."""

    def __init__(self, world: World):
        self.ready_info: dict[str, Any] = {}
        self.world, self.mood = world, world.rng.random()
        self.rows: dict[int, Any] = {}
        self.turns: dict[int, list[Turn]] = {}  # by episode, as it asked for them
        self.ready: list[int] = []  # episodes that go on
        self.dropped: list[int] = []  # that take their time to end

    def send(self, messages: list[tuple[Any, ...]]) -> None:
        for kind, number, *rest in messages:
            if kind == "start":
                self.rows[number], self.turns[number] = pickle.loads(rest[1]), []
                self.world.last_turns[number] = self.turns[number]
                self.ready.append(number)
            elif kind == "turn" and number in self.rows:
                self.turns[number][rest[0]].own = rest[1].tolist()
                if number not in self.ready:
                    self.ready.append(number)
            elif kind == "drop":
                self.forget(number)
                self.dropped.append(number)

    @property
    def asks(self) -> list[int]:
        """Episodes that wait for a turn."""
        return [number for number, turns in self.turns.items() if any(turn.own is None for turn in turns)]

    def kill(self) -> str:
        return "killed"

    def forget(self, number: int) -> None:
        self.rows.pop(number, None)
        self.turns.pop(number, None)
        self.ready = [n for n in self.ready if n != number]

    def advance(self, runner: Runner) -> None:
        rng = self.world.rng
        if self.dropped and rng.random() < 0.2:
            runner.on_message(self, {"dropped": self.dropped.pop()})  # type: ignore[arg-type]
        impatient = [n for n in self.asks if self.rows[n]["play"] == "moody" and n not in self.ready]
        if impatient and rng.random() < 0.05:  # it cancels its ask, and ends
            self.end(runner, rng.choice(impatient), 1.0)
        elif self.ready:
            number = self.ready.pop(rng.randrange(len(self.ready)))
            runner.on_message(self, {"on": number})  # type: ignore[arg-type]
            if self.rows[number]["play"] == "program":
                self.branch(runner, number)
            else:
                self.step(runner, number)
        runner.send_work()

    def step(self, runner: Runner, number: int) -> None:
        row, turns = self.rows[number], self.turns[number]
        seen = seen_of(turns)
        mood = random.Random(f"{row['seed']} {seen} {self.mood if row['play'] == 'moody' else ''}")
        choice = mood.random()
        if len(seen) == MAX_TURNS or choice < 0.3:
            self.end(runner, number, None if choice < 0.05 else float(len(seen)))
        else:
            observation, last = [mood.choice([7, 8])], len(seen) - 1
            after = mood.randint(-1, last) if mood.random() < 0.2 else last
            self.ask(runner, number, Turn(observation, after))

    def branch(self, runner: Runner, number: int) -> None:
        """Asks for what follows each turn, and ends with the last answer."""
        turns = self.turns[number]
        for after in [-1, *range(len(turns))]:
            path = self.path(number, after)
            if (after >= 0 and turns[after].own is None) or any(turn.after == after for turn in turns):
                continue
            plan = random.Random(f"{self.rows[number]['seed']} {path}")
            for child in range(plan.choice([1, 2, 3]) if after < 0 else plan.choice([0, 0, 1, 2])):
                self.ask(runner, number, Turn([7 + child], after), derive_seed(*path, 7 + child))
        if not any(turn.own is None for turn in turns):
            self.end(runner, number, 1.0)

    def ask(self, runner: Runner, number: int, turn: "Turn", prefix: int = 0) -> None:
        ask = {"ask": number, "turn": len(self.turns[number]), "observation": turn.observation, "after": turn.after}
        self.turns[number].append(turn)
        runner.on_message(self, ask | {"max_tokens": 8, "stop": [], "prefix": prefix})  # type: ignore[arg-type]

    def path(self, number: int, turn: int) -> list[int]:
        """All tokens up to a turn."""
        if turn < 0:
            return []
        t = self.turns[number][turn]
        return [*self.path(number, t.after), *t.observation, *(t.own or ())]

    def end(self, runner: Runner, number: int, score: float | None) -> None:
        asks = answered(self.turns[number])
        if self.rows[number]["play"] == "program":
            asks.sort(key=lambda ask: self.path(number, ask))
        seen = seen_of(self.turns[number], asks)
        failure = "" if score is not None and seen else "invalid"
        verdict = {"score": None if failure else score, "failure": failure}
        scores = [float(sum(turn)) for *_, turn in seen]
        end = {"end": number, "turns": asks, "finish": "stop", "verdict": verdict}
        runner.on_message(self, end | {"messages": seen.copy(), "turn_scores": scores})  # type: ignore[arg-type]
        self.forget(number)


@dataclass
class Turn:
    observation: list[int]
    after: int
    own: list[int] | None = None  # None: it is waited for


def answered(turns: list[Turn]) -> list[int]:
    return [ask for ask, turn in enumerate(turns) if turn.own is not None]


def seen_of(turns: list[Turn], asks: Sequence[int] | None = None) -> Seen:
    """What a play got: all its turns, or these in this order."""
    chosen = answered(turns) if asks is None else asks
    place = {ask: i for i, ask in enumerate(chosen)} | {-1: -1}
    return [(turns[ask].observation, place[turns[ask].after], turns[ask].own or []) for ask in chosen]


class Engines:
    """What they write is random, and noted."""

    def __init__(self, world: World):
        self.world = world

    def begin(self, requests: list[Request], more: Callable[[], bool]) -> None:
        self.waiting, self.more = list(requests), more
        self.running: list[Request] = []
        self.finished: list[Sample] = []
        self.stopping = False

    def run(self) -> Iterator[list[Sample]]:
        for _ in range(MAX_ROUNDS):
            if not (self.running or self.waiting or self.finished or self.more()):
                return
            self.world.advance()
            finished, self.finished = self.finished, []
            yield finished
        raise AssertionError("nobody owes anything, and episodes are open")

    def add(self, request: Request) -> None:
        assert not any(r.key == request.key for r in (*self.waiting, *self.running))
        self.waiting.append(request)

    def stop_early(self) -> None:
        self.stopping = True

    def advance(self) -> None:
        rng = self.world.rng
        while self.waiting and rng.random() < 0.7:
            self.running.append(self.waiting.pop(0))
        if self.running:
            self.finished.append(self.write(self.running.pop(rng.randrange(len(self.running)))))

    def write(self, request: Request) -> Sample:
        rng = self.world.rng
        new = [rng.randrange(10, 99) for _ in range(rng.randint(0, 2) if self.stopping else rng.randint(1, 3))]
        tokens, logprobs = np.array(new, dtype=np.int32), np.zeros(len(new), dtype=np.float32)
        finish = "cut" if (self.stopping and rng.random() < 0.7) or not new else "stop"
        rest = Sample(request.uid, request.index, "", tokens, logprobs, finish, 0, turn=request.turn)
        sample = join_partial(request.partial, rest) if request.partial else rest
        self.world.sampled.add((tuple(request.tokens), tuple(sample.tokens.tolist())))
        if request.partial:
            assert (tuple(request.tokens), tuple(request.partial.tokens.tolist())) in self.world.sampled
        return sample
