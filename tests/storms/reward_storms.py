"""World "rewards": RewardPool, Dispatcher and WorkPool, with simulated reward workers.

Workers judge slowly or quickly, hand back what they could not judge, die and stall. Some samples cannot be sent, some have no
verdict, and one may end every worker that judges it.
"""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from fleets import STALL_S, START_S, Fleet, Worker, number_of
from invariants import require
from simulated_cluster import SimulatedActor, SimulatedCluster, Steps

from rlsys.config.schema import Config, RewardFunction
from rlsys.types import Prompt, Sample, Verdict
from workers.fleet.cluster import Receive
from workers.reward.pool import RewardPool
from workers.reward.sample_queue import JudgeResult, RewardItem

DEFAULTS = Config()
UNSENDABLE, POISON = "cannot be pickled", "ends workers"


class Cluster(SimulatedCluster):
    def ask(self, actor: SimulatedActor, method: str, *arguments: Any, receive: Receive) -> None:
        if any(UNSENDABLE in str(item.inputs["completion"]) for item in arguments[0]):
            raise TypeError("cannot pickle it")
        super().ask(actor, method, *arguments, receive=receive)


class RewardActor(Worker):
    world: "Rewards"
    is_ready = False

    def ready(self) -> Steps:
        yield self.world.some(START_S * 0.05, START_S * 0.6)
        self.is_ready = True
        return {"batched": self.world.batched, "has_async": self.world.has_async, "notes": []}

    def judge(self, items: list[RewardItem]) -> Steps:
        require(4, self.is_ready, f"{self.name} judges before it is ready")
        results: list[JudgeResult] = []
        crash_at = self.world.rng.randrange(len(items)) if self.world.rng.random() < 0.1 else len(items)
        for number, item in enumerate(items):
            yield self.world.some(self.world.verdict_s, STALL_S * 0.4 / len(items))
            if POISON in item.inputs["completion"]:
                self.world.fault(f"{self.name} dies of a sample")
                self.die()
                yield 1.0
            if number < crash_at or item.alone:
                results.append(verdict_of(item.inputs["completion"]))
            else:  # the process ended, and another goes on with what is sent next
                results.append(replace(item, alone=number == crash_at))
        return results


def verdict_of(completion: str) -> Verdict:
    number = number_of(completion)
    if UNSENDABLE in completion:
        return Verdict(None, failure="exception")
    return Verdict(None, failure="timeout") if number % 11 == 0 else Verdict(float(number), {"own": float(number)})


class Rewards(Fleet):
    name = "rewards"
    kinds: ClassVar = {"reward": RewardActor}

    def __init__(self, seed: int):
        super().__init__(seed)
        rng, c = self.rng, DEFAULTS
        self.cluster = self.watchdog.cluster = Cluster(self)
        self.batched, self.has_async = rng.random() < 0.3, rng.random() < 0.3
        self.verdict_s = rng.choice([0.001, 0.1, 3.0])
        own = {"own": RewardFunction(1.0, "own_module:own_function")}
        self.config = replace(
            c,
            reward=replace(c.reward, functions=own, workers=rng.randint(1, 3)),
            cluster=replace(c.cluster, start_timeout_s=START_S),
        )
        self.batch = rng.choice([1, 4])
        self.odd = rng.choice(["", "", UNSENDABLE, POISON]) if rng.random() < 0.3 else ""
        self.count = 0

    def drive(self) -> None:
        pool = RewardPool(self.config, self.spawn, self.watchdog)
        pool.settings = [replace(service, batch=self.batch) for service in pool.settings]
        pool.start()
        for _ in range(self.rng.randint(1, 4)):
            calls = []
            for _ in range(self.rng.randint(1, 6)):
                calls.append(self.judge(pool))
                self.time.sleep(self.some(1.0))
            self.rng.shuffle(calls)
            for samples, future in calls:
                self.check(samples, future)
        require(1, pool.waiting_samples() == 0, f"{pool.waiting_samples()} samples still wait")
        assert pool.dispatcher
        held = [n for items in pool.dispatcher.pool.held.values() for n in items]
        require(1, not held, f"all verdicts have come, and workers hold {len(held)} samples")

    def judge(self, pool: RewardPool) -> tuple[list[Sample], "Future[list[Verdict]]"]:
        samples, prompts = [], {}
        for _ in range(self.rng.randint(1, 12)):
            self.count += 1
            uid = f"p{self.count // 3}"
            odd = self.odd if self.rng.random() < 0.1 else ""
            tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
            samples.append(Sample(uid, self.count, f"{self.count} {odd}", tokens, logprobs, "stop", 0))
            prompts[uid] = Prompt(uid, "s", "", [1], {})
        return samples, pool.judge(samples, prompts)

    def check(self, samples: list[Sample], future: "Future[list[Verdict]]") -> None:
        verdicts = future.result()
        require(1, len(verdicts) == len(samples), f"{len(samples)} samples, {len(verdicts)} verdicts")
        for sample, verdict in zip(samples, verdicts, strict=True):
            right = verdict_of(sample.text)
            same = verdict.score == right.score and bool(verdict.failure) == bool(right.failure)
            require(13, same, f"{sample.text}: {verdict} instead of {right}")
