"""World "episodes": EngineEpisodes, TurnLoop, EpisodePool, EpisodeWorkers, EpisodeRunner and all of the world "engines".

Engines play episodes. Episode workers are real runners around the plays of tests/workers/episodes, which ask for another thing each time they are
played again. Processes crash, retire and block, workers are lost, steps stop early and go on in the next.
"""

import itertools
import pickle
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from engine_storms import Engine, Engines, Key, Rank
from fleets import STALL_S, START_S, Worker, number_of
from invariants import require
from simulated_cluster import Answer, Signal, Steps, WorkerRaises

from rlsys.errors import WrongWeights
from rlsys.runs.stopping import StopSignal
from rlsys.types import Prompt, Request, Sample, join_partial
from workers.fleet.watchdog import Watchdog
from workers.learner.ranks import LearnerGroup
from workers.rollout.rollout_group import RolloutGroup
from workers.rollout.vllm_requests import prompt_tokens
from workers.sync.weight_sync import WeightSync
from workers.turns.engine_episodes import EngineEpisodes, Progress
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.messages import LINE_BITS
from workers.turns.pool import Life

sys.path.append(str(Path(__file__).parents[1] / "workers/episodes"))
from simulated_episodes import Runner, seen_turns

SIGN_OF_LIFE_S = 5.0
SETTLE_S = 20.0  # after which an idle worker has nothing left


def reply(tokens: list[int]) -> list[int]:
    """What the model writes after these tokens."""
    number = number_of(tokens)
    return [10 + (number * (i + 1)) % 80 for i in range(1 + number % 3)]


class WritingEngine(Engine):
    """Its samples follow from the tokens before them. It plays the episodes that it is given."""

    world: "Episodes"
    episodes: EngineEpisodes | None = None

    def __init__(self, world: "Episodes", name: str):
        super().__init__(world, name)
        self.turns: list[Request] = []
        self.told, self.ticking = Signal(world), False

    def use_episode_workers(self, lives: dict[str, Life]) -> Steps:
        yield 0.0
        if self.episodes is None:
            w = self.world
            own = Watchdog(Path("/nonexistent"), STALL_S, StopSignal(w.time), cluster=w.cluster, threads=w.time)
            self.episodes = EngineEpisodes(self.name, next(w.lines), own, lambda: None)
        self.episodes.use(lives)

    def play(self, pickled: bytes) -> Steps:
        w, requests = self.world, pickle.loads(pickled)
        self.require_setup()
        require(4, self.episodes, f"{self.name} knows no episode workers")
        assert self.episodes
        number, news, missing = next(w.streams), deque[Progress](), {(r.uid, r.index) for r in requests}
        self.running[number] = requests
        self.episodes.begin(requests, news.append)
        self.go_on_playing()
        try:
            while missing:
                while not news:
                    if self.verified and self.wrong:
                        raise WorkerRaises(WrongWeights("has weights that are not the policy's"))
                    yield self.told
                missing -= {(s.uid, s.index) for s in news[0].finished}
                yield Answer(pickle.dumps(news.popleft()))
        finally:
            del self.running[number]
            self.episodes.drop(news.append)
            self.cutting = self.cutting and bool(self.running)
            self.changed.give()

    def go_on_playing(self) -> None:
        assert self.episodes
        if self.episodes.is_open and not self.ticking:
            self.ticking = True
            self.world.time.after(self.world.some(0.1), self.tick)

    def tick(self) -> None:
        """Messages are exchanged, and the engine writes some turns."""
        w, self.ticking = self.world, False
        assert self.episodes
        if self.dead or not self.episodes.is_open:
            return
        if not self.stalled:
            self.turns += self.episodes.exchange()
            if self.verified and not self.wrong:
                done = [r for r in self.turns if self.cutting or w.rng.random() < 0.1 / w.gap_s]
                self.turns = [r for r in self.turns if not any(r is other for other in done)]
                if done:
                    w.check_weights(self)
                    self.episodes.accept([self.sample(r, self.version) for r in done])
            self.told.give()
        self.go_on_playing()

    def stop_early(self) -> Steps:
        if self.episodes is not None:
            self.episodes.stop_early()
        return (yield from super().stop_early())

    def sample(self, request: Request, began: int) -> Sample:
        whole, begun = reply(prompt_tokens(request)), request.partial
        have = begun.tokens.tolist() if begun else []
        require(1, whole[: len(have)] == have, f"{request.uid}: {have} is not the begin of {whole}")
        count = self.world.rng.randint(len(have), len(whole)) if self.cutting else len(whole)
        tokens = np.array(whole[len(have) : count], dtype=np.int32)
        logprobs, finish = np.zeros(len(tokens), np.float32), "stop" if count == len(whole) else "cut"
        new = Sample(request.uid, request.index, "", tokens, logprobs, finish, self.version, turn=request.turn)
        return join_partial(begun, new) if begun else new


class EpisodeActor(Worker):
    world: "Episodes"
    kinds = (*Worker.kinds, *["its process crashes", "its process retires", "its process blocks"] * 2)
    runner: Any = None

    def __init__(self, world: "Episodes", name: str):
        super().__init__(world, name)
        self.news, self.ticking, self.signing = Signal(world), False, False

    def start(self, model: str, window: int) -> Steps:
        yield self.world.some(START_S * 0.05, START_S * 0.6)
        self.runner = Runner(self.world)  # type: ignore[arg-type]
        return []

    def send(self, commands: bytes) -> Steps:
        yield from ()  # one thread handles commands in their order
        require(4, self.runner, f"{self.name} has not started")
        self.runner.send(pickle.loads(commands))
        self.go_on_playing()

    def begin_line(self, engine: str, line: int) -> Steps:
        yield from ()
        require(4, self.runner, f"{self.name} has not started")
        self.runner.begin_line(engine, line)
        self.news.give()  # the line that has ended
        self.go_on_playing()

    def events(self, line: int) -> Steps:
        yield 0.0
        if line in self.runner.ended_lines:
            return
        arrived = self.runner.events_of[line]
        while True:
            yield self.news
            yield self.world.some(0.05)
            events = []
            while not arrived.empty():
                events.append(arrived.get())
            if None in events:
                return
            yield Answer(pickle.dumps(events))

    def go_on_playing(self) -> None:
        process = self.runner.process
        impatient = any(process.rows[number]["play"] == "moody" for number in process.asks)
        if not self.ticking and (process.ready or process.dropped or impatient):
            self.ticking = True
            self.world.time.after(self.world.rng.expovariate(10), self.tick)
        if not all(events.empty() for events in self.runner.events_of.values()):
            self.news.give()
        if not self.signing and (self.runner.playing or self.runner.waiting):
            self.signing = True
            self.world.time.after(SIGN_OF_LIFE_S, self.sign)

    def sign(self) -> None:
        """All that are played may wait for their turns, and others for them."""
        self.signing = False
        if not self.dead:
            if not self.runner.working:
                self.news.give()
            self.go_on_playing()

    def tick(self) -> None:
        """One thing happens in the process."""
        self.ticking = False
        if not self.dead and not self.stalled:
            self.runner.process.advance(self.runner)
        if not self.dead:
            self.go_on_playing()

    def suffer_own(self, kind: str) -> None:
        if (runner := self.runner) is None:
            return
        cause = {"its process crashes": "crash", "its process retires": "retired"}.get(kind, "timeout")
        if cause == "timeout":
            if not (working := sorted(played.start.number for played in runner.working)):
                return
            runner.running = self.world.rng.choice(working)
        runner.replace_process(cause)
        runner.send_work()
        self.go_on_playing()


class Episodes(Engines):
    name = "episodes"
    kinds: ClassVar = {"rollout": WritingEngine, "policy": Rank, "episode": EpisodeActor}

    def __init__(self, seed: int):
        super().__init__(seed)
        self.in_flight, self.gap_s = False, self.rng.choice([0.1, 0.5, 2.0])
        c = self.config
        self.config = replace(
            c,
            episode=replace(c.episode, workers=self.rng.randint(1, 3)),
            pipeline=replace(c.pipeline, in_flight=False),
        )
        self.fault_budget += self.rng.randint(0, 2)
        self.last_turns: dict[int, Any] = {}
        self.lines = itertools.count(1)

    def drive(self) -> None:
        self.group = RolloutGroup(self.config, self.spawn, self.watchdog)
        self.group.start("model", self.transport, 100)
        self.sync = WeightSync(
            LearnerGroup("policy", 2, self.config, self.spawn, self.watchdog), self.group, self.transport
        )
        self.bring_weights(0)
        workers = EpisodeWorkers(self.config, self.spawn, self.watchdog)
        workers.start("model", 100)
        self.group.play_with(workers)
        carried: list[Request] = []
        for step in range(1, self.rng.randint(2, 4)):
            carried = self.play(self.group, carried + self.requests(step), step)
            self.bring_weights(step)
            self.time.sleep(SETTLE_S)
            self.check_idle()

    def requests(self, step: int) -> list[Request]:
        requests = []
        for g in range(self.rng.randint(1, 4)):
            uid, tokens = f"s{step}g{g}", [1, g]
            row = {"play": self.rng.choice(["same", "same", "program", "moody"]), "seed": uid}
            prompt = Prompt(uid, "s", "", tokens, row, play="f") if self.rng.random() < 0.8 else None
            requests += [Request(uid, i, tokens, 0, 1.0, 8, prompt=prompt) for i in range(self.rng.randint(1, 4))]
        return requests

    def play(self, rollout: RolloutGroup, requests: list[Request], step: int) -> list[Request]:
        """Returns the requests that a later step goes on with."""
        wanted = {(r.uid, r.index): r for r in requests}
        stop_after = self.rng.randint(1, len(wanted)) if self.rng.random() < 0.5 else len(wanted) + 1
        got, cut, stopped = Counter[Key](), dict[Key, Sample](), False
        for samples in rollout.generate(requests):
            for s in samples:
                key = s.uid, s.index
                require(1, key in wanted, f"{key} was not asked for")
                got[key] += 1
                require(1, got[key] == 1, f"{key} came twice")
                require(1, s.finish != "cut" or stopped, f"{key} is cut, and nothing was stopped")
                if s.finish == "cut":
                    cut[key] = s
                else:
                    self.check_turns(wanted[key], s)
            if len(got) >= stop_after and not stopped:
                self.log("stop early")
                stopped = True
                rollout.stop_early()
            if self.rng.random() < 0.2:
                self.time.sleep(self.some(0.3))
        require(1, stopped or len(got) == len(wanted), f"{len(wanted) - len(got)} of {len(wanted)} did not come")
        self.log(f"step {step}: {len(got)} of {len(wanted)} samples")
        rest = [r for key, r in wanted.items() if key in cut or key not in got]
        return [replace(r, partial=cut.get((r.uid, r.index), r.partial)) for r in rest]

    def check_turns(self, request: Request, sample: Sample) -> None:
        key, ends = (sample.uid, sample.index), [list(request.tokens)]
        require(1, bool(sample.episode) == bool(request.prompt), f"{key} is no episode")
        turns = seen_turns(sample)
        for observation, after, own in turns:
            tokens = ends[after + 1] + observation
            require(1, own == reply(tokens), f"{key}: {own} is not what is written after {tokens}")
            ends.append(tokens + own)
        if (episode := sample.episode) and episode.messages:
            require(1, [*map(tuple, episode.messages)] == turns, f"{key}: played was {episode.messages}, not {turns}")

    def check_idle(self) -> None:
        """What a lost engine began late ends as soon as its successor has something to do."""
        engines = [actor for actor in self.actors.values() if isinstance(actor, WritingEngine)]
        lines = {engine.episodes.line for engine in engines if engine.episodes}
        for name, actor in self.actors.items():
            if isinstance(actor, EpisodeActor) and not (actor.dead or actor.stalled or actor.faulty):
                plays = [*actor.runner.playing, *(played.start.number for played in actor.runner.waiting)]
                left = [number for number in plays if number >> LINE_BITS in lines]
                require(7, not left, f"{name} still plays {left}")
