"""World "episodes": EpisodeRollout, EpisodePool, EpisodeRunner and all of the world "engines".

Episode workers are real runners around the plays of tests/workers/episodes, which ask for another thing each time they are
played again. Processes crash, retire and block, workers are lost, steps stop early and go on in the next.
"""

import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from engine_storms import Engine, Engines, Key, Rank
from fleets import START_S, Worker, number_of
from invariants import require
from simulated_cluster import Answer, Signal, Steps

from rlsys.types import Prompt, Request, Sample, join_partial
from workers.episodes.episode_rollout import EpisodeRollout
from workers.episodes.pool import EpisodePool
from workers.learner.ranks import LearnerGroup
from workers.rollout.rollout_group import RolloutGroup
from workers.sync.weight_sync import WeightSync

sys.path.append(str(Path(__file__).parents[1] / "workers/episodes"))
from simulated_episodes import Runner

SETTLE_S = 20.0  # after which an idle worker has nothing left


def reply(tokens: list[int]) -> list[int]:
    """What the model writes after these tokens."""
    number = number_of(tokens)
    return [10 + (number * (i + 1)) % 80 for i in range(1 + number % 3)]


class WritingEngine(Engine):
    """Its samples follow from the tokens before them."""

    def sample(self, request: Request, began: int) -> Sample:
        whole, begun = reply(request.tokens), request.partial
        have = begun.tokens.tolist() if begun else []
        require(1, whole[: len(have)] == have, f"{request.uid}: {have} is not the begin of {whole}")
        count = self.world.rng.randint(len(have), len(whole)) if self.cutting else len(whole)
        tokens = np.array(whole[len(have) : count], dtype=np.int32)
        logprobs, finish = np.zeros(len(tokens), np.float32), "stop" if count == len(whole) else "cut"
        new = Sample(request.uid, request.index, "", tokens, logprobs, finish, self.version)
        return join_partial(begun, new) if begun else new


class EpisodeActor(Worker):
    world: "Episodes"
    kinds = (*Worker.kinds, *["its process crashes", "its process retires", "its process blocks"] * 2)
    runner: Any = None

    def __init__(self, world: "Episodes", name: str):
        super().__init__(world, name)
        self.news, self.ticking = Signal(world), False

    def start(self, model: str, window: int) -> Steps:
        yield self.world.some(START_S * 0.05, START_S * 0.6)
        self.runner = Runner(self.world)  # type: ignore[arg-type]
        return []

    def send(self, commands: bytes) -> Steps:
        yield 0.0
        require(4, self.runner, f"{self.name} has not started")
        self.runner.send(pickle.loads(commands))
        self.go_on_playing()

    def events(self) -> Steps:
        while True:
            while self.runner.events_queue.empty():
                yield self.news
            yield self.world.some(0.05)
            events = []
            while not self.runner.events_queue.empty():
                events.append(self.runner.events_queue.get())
            yield Answer(pickle.dumps(events))

    def go_on_playing(self) -> None:
        process = self.runner.process
        impatient = any(process.rows[number]["play"] == "moody" for number in process.asks)
        if not self.ticking and (process.ready or process.dropped or impatient):
            self.ticking = True
            self.world.time.after(self.world.rng.expovariate(10), self.tick)
        if not self.runner.events_queue.empty():
            self.news.give()

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
        self.last_seen: dict[int, Any] = {}  # of the plays, by episode

    def drive(self) -> None:
        self.group = RolloutGroup(self.config, self.spawn, self.watchdog)
        self.group.start("model", self.transport, 100)
        self.sync = WeightSync(
            LearnerGroup("policy", 2, self.config, self.spawn, self.watchdog), self.group, self.transport
        )
        self.bring_weights(0)
        pool = EpisodePool(self.config, self.spawn, self.watchdog)
        pool.start("model", 100)
        rollout = EpisodeRollout(self.group, pool, self.time)
        carried: list[Request] = []
        for step in range(1, self.rng.randint(2, 4)):
            carried = self.play(rollout, carried + self.requests(step), step)
            self.bring_weights(step)
            self.time.sleep(SETTLE_S)
            self.check_idle()

    def requests(self, step: int) -> list[Request]:
        requests = []
        for g in range(self.rng.randint(1, 4)):
            uid, tokens = f"s{step}g{g}", [1, g]
            row = {"play": "moody" if self.rng.random() < 0.3 else "same", "seed": uid}
            prompt = Prompt(uid, "s", "", tokens, row, play="f") if self.rng.random() < 0.8 else None
            requests += [Request(uid, i, tokens, 0, 1.0, 8, prompt=prompt) for i in range(self.rng.randint(1, 4))]
        return requests

    def play(self, rollout: EpisodeRollout, requests: list[Request], step: int) -> list[Request]:
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
        key, tokens = (sample.uid, sample.index), list(request.tokens)
        require(1, bool(sample.episode) == bool(request.prompt), f"{key} is no episode")
        turns = [(o.tolist(), own.tolist()) for o, own in sample.turns] if len(sample.tokens) else []
        for observation, own in turns:
            tokens += observation
            require(1, own == reply(tokens), f"{key}: {own} is not what is written after {tokens}")
            tokens += own
        if (episode := sample.episode) and episode.messages:
            require(1, [*map(tuple, episode.messages)] == turns, f"{key}: played was {episode.messages}, not {turns}")

    def check_idle(self) -> None:
        for name, actor in self.actors.items():
            if isinstance(actor, EpisodeActor) and not (actor.dead or actor.stalled or actor.faulty):
                left = [*actor.runner.playing, *(played.start.number for played in actor.runner.waiting)]
                require(7, not left, f"{name} still plays {left}")
