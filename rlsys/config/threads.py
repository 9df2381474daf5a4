"""CPU threads of engines and ranks. `auto`, the default, becomes a number when a configuration is read.

On CPU the last bits of results depend on the number of threads. So a resumed run keeps the number that it began with.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlsys.config.saved_runs import is_run
from rlsys.config.schema import Config

AUTO_OPTIONS = ("rollout.threads", "policy.threads")
SMALL_MODEL = 4_000_000  # bytes of weights below which a second thread costs as much time as it saves


def take_auto(values: dict[str, tuple[str, Any]]) -> list[str]:
    """Removes options that are `auto` from the values of a configuration. Returns the names of all that are."""
    auto = [key for key in AUTO_OPTIONS if key not in values or values[key][1] == "auto"]
    for key in auto:
        values.pop(key, None)
    return auto


def resolve_auto(config: Config, auto: list[str]) -> Config:
    """Sets these options: to the numbers of the run that stands in run.dir, or to a share of this machine's cores."""
    if not auto:
        return config
    numbers = share_cores(config) | started_with(Path(config.run.dir).expanduser())
    for key in auto:
        section = key.partition(".")[0]
        config = replace(config, **{section: replace(getattr(config, section), threads=numbers[key])})
    return config


def share_cores(config: Config) -> dict[str, int]:
    """Threads of each engine and rank. Engines and ranks take turns, unless samples may lag behind updates."""
    r, cores = config.rollout, len(os.sched_getaffinity(0))
    if config.cluster.device != "cpu" or r.exact or is_small(config.model.path):
        return dict.fromkeys(AUTO_OPTIONS, 1)
    engines, ranks = r.engines * r.tensor_parallel, config.policy.ranks
    if config.pipeline.max_lag:
        engines = ranks = engines + ranks
    return {"rollout.threads": max(cores // max(engines, 1), 1), "policy.threads": max(cores // max(ranks, 1), 1)}


def is_small(model: str) -> bool:
    """True for the built-in models, and for directories with small weights."""
    weights = sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
    return model.startswith("builtin:") or 0 < weights < SMALL_MODEL


def started_with(run: Path) -> dict[str, int]:
    """The numbers of a run that has begun; nothing if there is none."""
    if not is_run(run):
        return {}
    tree = OmegaConf.load(run / "config.yaml")
    return {key: value for key in AUTO_OPTIONS if isinstance(value := OmegaConf.select(tree, key), int)}
