"""World "engines": RolloutGroup, Generation, WorkPool, Suspects, ReplaceableWorkers, Watchdog, LearnerGroup and WeightSync.

Engines and ranks are simulated: engines answer late, in parts and twice; they die, stall, pause, lose their weights or die
of one sample. Weights are numbers in a memory that the next sync writes over. Some runs generate in flight, stop early, or
are told to stop.
"""

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from fleets import STALL_S, START_S, Fleet, Worker, number_of
from invariants import require
from simulated_cluster import Answer, Signal, SimulatedActor, Steps, WorkerRaises

from rlsys.config.schema import Config
from rlsys.errors import WrongWeights
from rlsys.types import Request, Sample, join_partial
from workers.fleet.cluster import CallFailed, Receive
from workers.learner.ranks import LearnerGroup
from workers.rollout.rollout_group import RolloutGroup
from workers.sync import SENDERS
from workers.sync.verify import combine_ranks
from workers.sync.weight_sync import WeightSync

Key = tuple[str, int]
RANKS = 2
DEFAULTS = Config()


class Engine(Worker):
    world: "Engines"
    kinds = (*Worker.kinds, "has wrong weights")

    def __init__(self, world: "Engines", name: str):
        super().__init__(world, name)
        self.started = self.connected = self.wrong = False
        self.verified = True
        self.version = self.content = -1
        self.running: dict[int, list[Request]] = {}  # by stream
        self.changed = Signal(world)
        self.loaded = 0  # parts of the present sync
        self.cutting = self.weights_busy = False
        self.owes_since = 0.0

    def suffer_own(self, kind: str) -> None:
        self.wrong = self.faulty = True

    def receive(self, method: str, arguments: tuple[Any, ...], receive: Receive, stream: bool) -> None:
        if stream and not self.owes:
            self.owes_since = self.world.time.now()
        super().receive(method, arguments, receive, stream)

    @property
    def owes(self) -> bool:
        return any(task.stream for task in self.tasks)

    def require_setup(self) -> None:
        if not self.started or not self.connected:
            raise WorkerRaises(AttributeError("it is not set up"))

    # --- its methods ----------------------------------------------------------------------------------------------------

    def start(self, model: str, transport: str, longest: int) -> Steps:
        yield self.world.some(START_S * 0.05, START_S * 0.6)
        self.started = True

    def connect(self, info: dict[str, Any]) -> Steps:
        yield self.world.some(0.1)
        self.connected = True

    def load_weights(self, parts: list[list[Any]], version: int) -> Steps:
        w = self.world
        self.require_setup()
        while not w.in_flight and self.running:
            yield self.changed
        while self.weights_busy:
            yield self.changed
        self.verified, self.loaded, self.weights_busy = not w.verify, 0, True
        contents = set()
        for number, part in enumerate(parts):
            yield from part
            if any(isinstance(rank.value, CallFailed) for rank in part):
                yield 10.0  # the driver should name the rank as the cause
                raise WorkerRaises(RuntimeError("a rank's answer is lost"))
            yield w.some(0.3, STALL_S * 0.05)
            contents |= {w.memory[number] if w.transport != "object_store" else rank.value for rank in part}
            self.loaded += 1
            self.changed.give()
        self.version, self.content = version, contents.pop() if len(contents) == 1 else -2
        self.weights_busy = False
        self.changed.give()

    def wait_until_loaded(self, part: int) -> Steps:
        while self.loaded <= part:
            yield self.changed

    def verify_weights(self, version: int, expected: dict[str, str]) -> Steps:
        while self.weights_busy:
            yield self.changed
        self.weights_busy = True
        yield self.world.some(0.1)
        self.weights_busy = False
        self.wrong |= self.version != version or expected != fingerprints(self.content)
        self.verified = True
        self.changed.give()
        return "they differ" if self.wrong else ""

    def generate(self, pickled: bytes) -> Steps:
        w, requests = self.world, pickle.loads(pickled)
        self.require_setup()
        number = next(w.streams)
        self.running[number] = requests
        began = self.version
        w.rng.shuffle(requests)
        try:
            while requests:
                if w.poison and any((r.uid, r.index) == w.poison for r in requests) and w.rng.random() < 0.5:
                    w.fault(f"{self.name} dies of {w.poison}")
                    self.die()
                    yield 1.0
                yield w.some(w.gap_s, STALL_S * 0.4)
                while not self.verified:
                    yield self.changed
                if self.wrong:
                    raise WorkerRaises(WrongWeights("has weights that are not the policy's"))
                count = len(requests) if self.cutting else w.rng.randint(1, min(len(requests), w.most_at_once))
                done, requests[:] = requests[:count], requests[count:]
                w.check_weights(self)
                yield Answer(pickle.dumps([self.sample(r, began) for r in done]))
        finally:
            del self.running[number]
            self.cutting = self.cutting and bool(self.running)
            self.changed.give()

    def sample(self, request: Request, began: int) -> Sample:
        key = request.uid, request.index
        wanted = self.world.length(key)
        have = len(request.partial.tokens) if request.partial else 0
        count = self.world.rng.randint(have, wanted) if self.cutting else wanted
        tokens = np.full(count - have, request.tokens[0], dtype=np.int32)
        changes = ((len(tokens) - 1, self.version),) if self.version > began and len(tokens) > 1 else ()
        version = began if changes else self.version
        finish = "stop" if count == wanted else "cut"
        new = Sample(*key, "", tokens, np.zeros(len(tokens), np.float32), finish, version, changes)
        return join_partial(request.partial, new) if request.partial else new

    def stop_early(self) -> Steps:
        yield 0.0
        self.cutting = bool(self.running)


class Rank(SimulatedActor):
    world: "Engines"

    def connection_info(self) -> Steps:
        yield 0.1
        return {"parts": self.world.parts, "by_position": False}

    def connect(self, info: dict[str, Any]) -> Steps:
        yield 0.1

    def send(self, part: int, *loaded: Any) -> Steps:
        yield self.world.some(0.2, STALL_S * 0.05)
        self.world.memory[part] = self.world.policy_version
        return self.world.policy_version

    def fingerprints(self) -> Steps:
        yield self.world.some(0.2, STALL_S * 0.05)
        return {"w": [self.world.policy_version]} if self.world.verify else {}

    def finish_send(self) -> Steps:
        yield 0.0


def fingerprints(content: int) -> dict[str, str]:
    return combine_ranks([{"w": [content]}] * RANKS)


class Engines(Fleet):
    name = "engines"
    kinds: ClassVar = {"rollout": Engine, "policy": Rank}

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.rng
        self.in_flight = rng.random() < 0.4
        self.transport = rng.choice(["shared_memory"] * 6 + ["object_store"] * 2 + ["nccl", "cuda_ipc"])
        self.verify = rng.random() < 0.8
        self.parts, self.memory = rng.randint(1, 3), dict[int, int]()
        self.gap_s = rng.choice([0.25, 0.25, 2.0, 8.0])  # between two answers of an engine
        self.most_at_once = rng.choice([1, 100])  # samples in an answer
        self.poison: Key | None = None
        self.policy_version = 0
        self.synced = self.all_have = -1  # the newest version that engines may have; and the newest that all have
        self.streams = itertools.count()
        engines, most = rng.randint(1, 4), rng.choice([1, 2, 8])
        c = DEFAULTS
        self.config = replace(
            c,
            rollout=replace(c.rollout, engines=engines, max_sequences=most),
            cluster=replace(c.cluster, start_timeout_s=START_S),
            pipeline=replace(c.pipeline, in_flight=self.in_flight),
        )

    @property
    def faults_to_end(self) -> int:  # type: ignore[override]
        wrong = any("wrong" in fault for fault in self.faults)
        return 1 if not SENDERS[self.transport].replayable else 2 if wrong else 3

    def length(self, key: Key) -> int:
        return 1 + number_of(key) % 5

    def event(self, kind: str, **facts: Any) -> None:
        super().event(kind, **facts)
        if kind == "stall" and facts["doing"] == "generating":
            engine = self.actors[facts["waiting_for"][0]]
            assert isinstance(engine, Engine)
            since = max(engine.stalled_at, engine.owes_since)
            late = self.time.now() - since
            if engine.stalled and self.replaced_at < since:  # else the driver was away
                require(12, late < 1.2 * STALL_S, f"{engine.name} stalled, which was noticed after {late:.0f} s")

    def check_weights(self, engine: Engine) -> None:
        if self.actors[engine.name] is not engine:
            return  # its word comes too late
        facts = f"{engine.name} has weights {engine.content} as version {engine.version}, synced is {self.synced}"
        if self.verify:
            require(4, engine.content == engine.version, facts)
        require(3, engine.version <= self.synced, facts)
        if not self.in_flight:
            require(4, engine.version == self.all_have, facts)

    # --- the driver -----------------------------------------------------------------------------------------------------

    def drive(self) -> None:
        self.group = group = RolloutGroup(self.config, self.spawn, self.watchdog)
        group.start("model", self.transport, 100)
        ranks = LearnerGroup("policy", RANKS, self.config, self.spawn, self.watchdog)
        self.sync = WeightSync(ranks, group, self.transport)
        self.bring_weights(0)
        carried: list[Request] = []
        for step in range(1, self.rng.randint(2, 5)):
            requests = carried + self.requests(step)
            if self.in_flight:
                future = self.time.submit(lambda r=requests: self.generate(r), "generate")
                self.time.sleep(self.rng.expovariate(1 / (4 * self.gap_s)))
                self.bring_weights(step)
                carried = future.result()
            else:
                carried = self.generate(requests)
                self.bring_weights(step)

    def bring_weights(self, version: int) -> None:
        self.log(f"sync of version {version}")
        self.policy_version = self.synced = version
        self.sync.run(version)
        self.all_have = version

    def requests(self, step: int) -> list[Request]:
        size = self.rng.randint(1, 6)
        uids = [f"s{step}g{g}" for g in range(self.rng.randint(1, 6))]
        if self.rng.random() < 0.03:
            self.poison = self.rng.choice(uids), self.rng.randrange(size)
            self.log(f"sample {self.poison} ends engines")
        return [Request(uid, i, [number_of(uid) % 90], 0, 1.0, 8) for uid in uids for i in range(size)]

    def generate(self, requests: list[Request]) -> list[Request]:
        """Returns the requests that a later step goes on with."""
        rng, wanted = self.rng, {(r.uid, r.index): r for r in requests}
        stop_after = rng.randint(1, len(wanted)) if rng.random() < 0.2 else len(wanted) + 1
        got, partial = Counter[Key](), dict[Key, Sample]()
        stopped_at = 0.0
        generation = self.group.begin(requests)
        for samples in generation.run():
            for s in samples:
                key = s.uid, s.index
                require(1, key in wanted, f"{key} was not asked for")
                got[key] += 1
                require(1, got[key] == 1, f"{key} came twice")
                require(1, s.finish == "stop" or stopped_at, f"{key} is cut, and nothing was stopped")
                if s.finish == "cut":
                    partial[key] = s
                else:
                    require(1, len(s.tokens) == self.length(key), f"{key} has {len(s.tokens)} tokens")
                    require(1, set(s.tokens) == {wanted[key].tokens[0]}, f"{key} has another's tokens")
            if not stopped_at:
                held = sum(len(items) for items in generation.pool.held.values())
                counts = len(got), held, generation.waiting_count
                require(1, sum(counts) == len(wanted), f"{len(wanted)} asked; came, held and waiting: {counts}")
                if len(got) >= stop_after:
                    self.log("stop early")
                    stopped_at = self.time.now()
                    generation.stop_early()
            if rng.random() < 0.2:
                self.time.sleep(self.some(0.5))
        if not stopped_at:
            require(1, len(got) == len(wanted), f"{len(wanted) - len(got)} of {len(wanted)} did not come")
        self.log(f"{len(got)} of {len(wanted)} samples")
        rest = [r for key, r in wanted.items() if key in partial or key not in got]
        return [replace(r, partial=partial.get((r.uid, r.index), r.partial)) for r in rest]
