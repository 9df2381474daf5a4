"""Suggests changes to a configuration that does not fit.

There is a fixed list of hints: settings that save memory, and placements that need fewer GPUs. Each is tried alone, by
the same arithmetic and by `check`. If that is not enough, the memory hints are added to each placement one by one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.bundles import count_other_gpus
from launch.roles import count_gpus, count_workers
from launch.tools.estimates.engine import kv_cache_tokens
from launch.tools.estimates.memory import MIB
from launch.tools.fitting.fit import TIGHT, Fit
from rlsys.checks import check
from rlsys.checks.training import OFFLOADABLE
from rlsys.config.schema import Config, DataConfig, EvalConfig
from rlsys.errors import ConfigError

Settings = dict[str, Any]


@dataclass(frozen=True)
class Suggestion:
    """`Suggestion({"policy.zero_stage": 3}, fit, slower=1.04)`"""

    settings: Settings
    fit: Fit
    slower: float  # estimated seconds of a step, relative to the configuration as it is

    @property
    def text(self) -> str:
        """As on the command line: `policy.zero_stage=3 policy.offload=[optimizer,params]`"""
        return " ".join(f"{key}={format_value(value)}" for key, value in self.settings.items())


def format_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def with_settings(config: Config, settings: Settings) -> Config:
    for key, value in settings.items():
        section, option = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def without_data(config: Config) -> Config:
    """The configuration with the built-in data set in place of its own, whose files need not be here."""
    train = {
        name: dataclasses.replace(source, path="builtin:zigzag", split="train", subset="", max_new_tokens=None)
        for name, source in config.data.train.items()
    }
    return replace(config, data=DataConfig(train=train), eval=EvalConfig(every=config.eval.every))


Attempt = Callable[[Settings], Suggestion | None]  # None if the settings change nothing or are not valid


def suggest_changes(fit: Fit, try_fit: Callable[[Config], Fit], count: int = 3) -> list[Suggestion]:
    """Up to `count` changes that make it fit, the fastest first. If none does, the one that comes nearest."""
    known_problems = set(check(without_data(fit.config), fit.model))

    def attempt(settings: Settings) -> Suggestion | None:
        now = {key: getattr(getattr(fit.config, key.split(".")[0]), key.split(".")[1]) for key in settings}
        settings = {key: value for key, value in settings.items() if value != now[key]}
        config = with_settings(fit.config, settings)
        if not settings or set(check(without_data(config), fit.model)) - known_problems:
            return None
        try:
            changed = try_fit(config)
        except ConfigError:
            return None
        return Suggestion(settings, changed, changed.times.step / fit.times.step)

    memory, placements = list(memory_hints(fit)), list(placement_hints(fit))
    tried = [attempt(hint) for hint in [*memory, *placements]]
    if sum(s is not None and s.fit.fits for s in tried) < count:
        tried += [add_hints(placement, memory, attempt) for placement in [{}, *placements]]
    fitting = [drop_unneeded(s, attempt) for s in tried if s and s.fit.fits]
    fitting.sort(key=lambda s: (round(s.slower, 3), len(s.settings)))
    fastest: dict[frozenset[str], Suggestion] = {}  # by the options that are changed
    for suggestion in fitting:
        fastest.setdefault(frozenset(suggestion.settings), suggestion)
    simplest = [s for options, s in fastest.items() if not any(fewer < options for fewer in fastest)]
    nearest = sorted((s for s in tried if s), key=lambda s: s.fit.bytes_over)
    return simplest[:count] or nearest[:1]


def add_hints(placement: Settings, memory: list[Settings], attempt: Attempt) -> Suggestion | None:
    """Adds each memory hint that brings the placement nearer to a fit, until it fits."""
    best = attempt(placement)
    for hint in memory:
        if best and best.fit.fits:
            break
        more = attempt((best.settings if best else placement) | hint)
        if more and (best is None or more.fit.bytes_over < best.fit.bytes_over):
            best = more
    return best


def drop_unneeded(suggestion: Suggestion, attempt: Attempt) -> Suggestion:
    """Drops settings that it fits without: a later hint may have made an earlier one unnecessary."""
    for key in suggestion.settings:
        fewer = attempt({k: v for k, v in suggestion.settings.items() if k != key})
        if fewer and fewer.fit.fits:
            return drop_unneeded(fewer, attempt)
    return suggestion


def memory_hints(fit: Fit) -> Iterator[Settings]:
    """Settings that save memory, those that cost the least time first."""
    c, longest = fit.config, fit.lengths.prompt + fit.lengths.completion
    p, gpu = c.policy, c.cluster.device == "gpu"
    yield {"sync.transport": "auto"}
    yield {"policy.tokens_per_pack": max(p.tokens_per_pack // 2, min(longest, p.tokens_per_pack))}
    for stage in range(p.zero_stage + 1, 4):
        yield {"policy.zero_stage": stage}
    yield {"policy.gradient_checkpointing": True}
    for sharing in (2, 4, 8) if not fit.model.mixer else ():
        yield {"policy.sequence_parallel": sharing, "policy.gradient_checkpointing": True}
    yield {"policy.tokens_per_pack": min(longest, p.tokens_per_pack)}
    yield {"rollout.max_sequences": min(c.rollout.max_sequences, 64)}
    if not gpu:
        yield {"rollout.kv_cache_mb": largest_kv_cache(fit)}
        return
    yield {"policy.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
    for share in (0.9, 0.7, 0.5, 0.3, 0.2):
        yield {"rollout.gpu_memory": share}
    for stage, parts in ((0, ["activations"]), (0, ["optimizer"]), (3, ["optimizer", "params"]), (3, [*OFFLOADABLE])):
        more = {"policy.gradient_checkpointing": True} if "activations" in parts else {}
        stages = {"policy.zero_stage": max(stage, p.zero_stage)}
        yield stages | more | {"policy.offload": [part for part in OFFLOADABLE if part in (*p.offload, *parts)]}


def largest_kv_cache(fit: Fit) -> int:
    """MiB of an engine's cache on CPU: as much as main memory has room for, and enough for one full sequence."""
    c, r = fit.config, fit.config.rollout
    longest = fit.lengths.longest
    enough = math.ceil(r.kv_cache_mb * longest / kv_cache_tokens(c, fit.model, 0.0, longest))
    largest = r.kv_cache_mb
    for node, needed, names in zip(fit.nodes, fit.host_bytes, fit.layout.cpu_workers, strict=True):
        engines = sum(name.startswith("rollout") for name in names)
        if node.memory and engines:
            left = (1 - TIGHT) * node.memory - needed
            largest = min(largest, int(r.kv_cache_mb + left // (engines * r.tensor_parallel * MIB)))
    return max(enough, largest)


def placement_hints(fit: Fit) -> Iterator[Settings]:
    """Numbers of engines and ranks that the GPUs, or the main memory, have room for."""
    c = fit.config
    if c.cluster.device == "cpu":
        yield {"rollout.engines": 1}
        yield {"policy.ranks": 1}
        yield {"rollout.engines": 1, "policy.ranks": 1}
        return
    if count_gpus("reference", c):
        yield {"reference.place": "cpu"}
    if count_workers("critic", c):
        yield {"critic.ranks": 1}
    gpus = {
        placement: sum(n.gpus for n in fit.nodes) - count_other_gpus(with_settings(c, {"cluster.placement": placement}))
        for placement in ("separate", "colocated")
    }
    now = c.rollout.tensor_parallel
    for wide in [now, *(w for w in (1, 2, 4, 8) if w != now and fit.model.can_split(w))]:
        yield from separate_hints(c, gpus["separate"], wide)
        yield from colocated_hints(c, gpus["colocated"], wide)


def separate_hints(c: Config, gpus: int, wide: int) -> Iterator[Settings]:
    """Engines of `wide` GPUs and ranks on other GPUs: the ranks of now, the engines of now, or half of the GPUs each."""
    for engines in ((gpus - c.policy.ranks) // wide, c.rollout.engines, gpus // 2 // wide, 1):
        ranks = gpus - engines * wide
        if engines > 0 and ranks > 0:
            settings = {"cluster.placement": "separate", "rollout.tensor_parallel": wide, "rollout.engines": engines}
            yield settings | {"policy.ranks": min(ranks, c.policy.ranks)}
            yield settings | {"policy.ranks": ranks}


def colocated_hints(c: Config, gpus: int, wide: int) -> Iterator[Settings]:
    """Engines and ranks that share all GPUs."""
    ranks = gpus - gpus % wide
    if ranks > 0:
        shared = {"rollout.tensor_parallel": wide, "rollout.engines": ranks // wide, "policy.ranks": ranks}
        shared |= {"critic.ranks": min(count_workers("critic", c), ranks)} if count_workers("critic", c) else {}
        yield shared | {"cluster.placement": "colocated", "rollout.gpu_memory": min(c.rollout.gpu_memory, 0.5)}
