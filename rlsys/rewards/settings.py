"""The settings of reward processes: which functions they run, and within which limits."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.config.schema import Config, RewardFunction

FunctionSets = dict[str, dict[str, RewardFunction]]  # by data set; "" stands for reward.functions
DEFAULT_TIMEOUT_S = {"code": 6.0, "http": 30.0, "judge": 120.0}  # of a call, without the option `timeout_s`


@dataclass(frozen=True)
class RewardSettings:
    """The settings of one reward service: the pool of reward processes, or one reward model."""

    functions: FunctionSets
    timeout_s: float
    memory_mb: int
    batch: int = 32  # most samples that a batched function gets at once
    concurrency: int = 64  # samples that a process's async functions judge at the same time, roughly
    start_timeout_s: float = 300.0  # for importing the functions, or loading a model
    keep_spare: bool = True  # whether a second process is kept ready
    workers: int = 1
    gpus: float = 0.0  # of each worker
    models: dict[str, int] = field(default_factory=dict)  # frozen models that functions may ask, and their engines

    @property
    def description(self) -> str:
        names = {f.function for functions in self.functions.values() for f in functions.values()}
        return f"reward.functions ({', '.join(sorted(names))})"

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of a reward model; empty for the pool."""
        return {} if self.keep_spare else next(f.options for fs in self.functions.values() for f in fs.values())


def reward_services(config: Config) -> list[RewardSettings]:
    """Returns one for the pool of reward processes, if it has functions to run, and one for each reward model."""
    r = config.reward
    sets = {"": r.functions} | {
        name: source.reward
        for name, source in (*config.data.train.items(), *config.eval.datasets.items())
        if source.reward
    }
    common = RewardSettings(sets, r.timeout_s, r.memory_mb, start_timeout_s=config.cluster.start_timeout_s)
    own = select_functions(sets, lambda f: f.function != "model")
    engines = {name: model.engines for name, model in config.models.items()}
    pool = replace(common, functions=own, workers=r.workers, models=engines)
    models = {
        json.dumps(f.options, sort_keys=True): f for fs in sets.values() for f in fs.values() if f.function == "model"
    }
    settings = [pool] if pool.functions else []
    for f in models.values():
        settings.append(
            replace(
                common,
                functions=select_functions(sets, lambda g, f=f: g.function == "model" and g.options == f.options),  # type: ignore[misc]
                memory_mb=0,
                keep_spare=False,
                batch=f.options.get("batch", common.batch),
                gpus=f.options.get("gpus", 0.0),
            )
        )
    return settings


def select_functions(sets: FunctionSets, predicate: Callable[[RewardFunction], bool]) -> FunctionSets:
    """Keeps the functions for which `predicate` is true, and drops sets that become empty."""
    kept = {name: {n: f for n, f in functions.items() if predicate(f)} for name, functions in sets.items()}
    return {name: functions for name, functions in kept.items() if functions}


def worker_name(service: int, index: int) -> str:
    """Returns reward-0, reward-1, … for the pool, and reward-1-0 for a reward model, which is a service of its own."""
    return f"reward-{service}-{index}" if service else f"reward-{index}"


def function_deadline(f: RewardFunction, timeout_s: float, asks: bool = False) -> float:
    """Returns the seconds after which a function is stopped (0: never); longer than the function's own time limit.

    `asks`: whether it asks a frozen model.
    """
    if f.deadline_s is not None or not timeout_s:
        return f.deadline_s or timeout_s
    if f.function == "model" or (asks and f.function not in DEFAULT_TIMEOUT_S):
        return max(timeout_s, 120.0)
    if f.function in DEFAULT_TIMEOUT_S:
        own_timeout_s = f.options.get("timeout_s", DEFAULT_TIMEOUT_S[f.function])
        return max(timeout_s, 2 * own_timeout_s + 5)  # so that one repetition fits in
    return timeout_s
