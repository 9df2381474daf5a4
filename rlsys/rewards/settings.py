"""What reward processes are told: which functions they run, and within what limits."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rlsys.config.schema import Config, RewardFunction

FunctionSets = dict[str, dict[str, RewardFunction]]  # by data set; "" is reward.functions
DEFAULT_TIMEOUT_S = {
    "code": 6.0,
    "http": 30.0,
    "judge": 120.0,
}  # seconds of a call, if their option `timeout_s` does not say


@dataclass(frozen=True)
class RewardSettings:
    functions: FunctionSets
    timeout_s: float
    memory_mb: int
    batch: int
    concurrency: int
    start_timeout_s: float = 300.0  # what importing the functions, or loading a model, may take
    keep_spare: bool = True  # whether a second process stands by
    workers: int = 1
    gpus: float = 0.0  # of each worker

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of a reward model; of the pool, none."""
        return {} if self.keep_spare else next(f.options for fs in self.functions.values() for f in fs.values())


def reward_services(config: Config) -> list[RewardSettings]:
    """One for the pool of reward processes, if it has anything to do, and one for each reward model."""
    r = config.reward
    sets = {"": r.functions} | {
        name: source.reward
        for name, source in (*config.data.train.items(), *config.eval.datasets.items())
        if source.reward
    }
    common = RewardSettings(sets, r.timeout_s, r.memory_mb, r.batch, r.concurrency, config.cluster.start_timeout_s)
    pool = replace(common, functions=select_functions(sets, lambda f: f.function != "model"), workers=r.workers)
    found = [pool] if pool.functions else []
    models = {
        json.dumps(f.options, sort_keys=True): f for fs in sets.values() for f in fs.values() if f.function == "model"
    }
    for f in models.values():
        found.append(
            replace(
                common,
                functions=select_functions(sets, lambda g, f=f: g.function == "model" and g.options == f.options),  # type: ignore[misc]
                memory_mb=0,
                keep_spare=False,
                batch=f.options.get("batch", r.batch),
                gpus=f.options.get("gpus", 0.0),
            )
        )
    return found


def select_functions(sets: FunctionSets, which: Callable[[RewardFunction], bool]) -> FunctionSets:
    """The functions that `which` is true of; sets without any are left out."""
    found = {name: {n: f for n, f in functions.items() if which(f)} for name, functions in sets.items()}
    return {name: functions for name, functions in found.items() if functions}


def worker_name(service: int, index: int) -> str:
    """reward-0, reward-1, …; reward models are services of their own, reward-1-0."""
    return f"reward-{service}-{index}" if service else f"reward-{index}"


def function_deadline(f: RewardFunction, timeout_s: float) -> float:
    """Seconds after which a function is stopped. One that has a time limit of its own gets to use it; 0: never."""
    if f.deadline_s is not None or not timeout_s:
        return f.deadline_s or timeout_s
    if f.function == "model":
        return max(timeout_s, 120.0)
    if f.function in DEFAULT_TIMEOUT_S:
        return max(
            timeout_s, 2 * f.options.get("timeout_s", DEFAULT_TIMEOUT_S[f.function]) + 5
        )  # so that one more try has a chance
    return timeout_s
