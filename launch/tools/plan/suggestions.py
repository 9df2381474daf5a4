"""What could be changed of a configuration that does not fit: real variants of it, tried by the same arithmetic and by `check`."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.bundles import count_other_gpus, critic_ranks, reference_gpus
from launch.tools.plan.fit import TIGHT, Fit
from rlsys.checks import check
from rlsys.config.schema import Config, ConfigError, DataConfig, EvalConfig
from rlsys.estimates.engine import kv_cache_tokens
from rlsys.estimates.memory import MIB

DEPTH = 4  # changes together
BEAM = 10  # of the variants that are still too large, those that go on
Settings = dict[str, Any]


@dataclass(frozen=True)
class Suggestion:
    """`Remedy({"policy.zero_stage": 3}, fit, slower=1.04)`"""

    settings: Settings
    fit: Fit
    slower: float  # estimated seconds of a step, over those without it

    @property
    def words(self) -> str:
        return " ".join(f"{key}={_written(value)}" for key, value in self.settings.items())


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def with_settings(config: Config, settings: Settings) -> Config:
    for key, value in settings.items():
        section, option = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def suggest_changes(found: Fit, try_it: Callable[[Config], Fit], count: int = 3) -> list[Suggestion]:
    """The cheapest first. Where nothing does, those that come nearest."""
    base = set(check(without_data(found.config), found.model))
    fitting: list[Suggestion] = []
    front = [Suggestion({}, found, 1.0)]
    nearest: list[Suggestion] = []
    seen: set[frozenset[tuple[str, Any]]] = set()
    for _ in range(DEPTH):
        tried: list[Suggestion] = []
        for before in front:
            for more in changes(before.fit):
                settings = _new(found.config, before.settings | more)
                key = frozenset(settings.items())
                if key in seen or any(r.settings.items() <= settings.items() for r in fitting):
                    continue
                seen.add(key)
                if remedy := _tried(found, settings, base, try_it):
                    if remedy.fit.fits:
                        fitting.append(simplest(found, remedy, base, try_it))
                    else:
                        tried.append(remedy)
        nearer = sorted((r for r in tried if r.fit.bytes_over < found.bytes_over), key=_far)[:BEAM]
        placed = [
            r for r in tried if found.layout.missing and not r.fit.layout.missing
        ]  # with whatever is left to save
        nearest += nearer
        front = nearer + [r for r in sorted(placed, key=_far)[:BEAM] if r not in nearer]
        fitting = _needed(fitting)
        if len({frozenset(r.settings) for r in fitting}) >= count or not front:
            break
    return _several(fitting, count, _dear) or _several(nearest, count, _far)


def _dear(remedy: Suggestion) -> tuple[float, float]:
    return round(remedy.slower, 3), len(remedy.settings)


def _far(remedy: Suggestion) -> tuple[float, float]:
    return remedy.fit.bytes_over, remedy.slower


def simplest(found: Fit, remedy: Suggestion, base: set[str], try_it: Callable[[Config], Fit]) -> Suggestion:
    """Without what it does not need: one step may have undone what another was for."""
    for key in list(remedy.settings):
        fewer = {k: v for k, v in remedy.settings.items() if k != key}
        if fewer and (now := _tried(found, fewer, base, try_it)) and now.fit.fits:
            remedy = now
    return remedy


def _needed(fitting: list[Suggestion]) -> list[Suggestion]:
    """Without those to which another is preferred, which changes fewer of the same options and is no slower."""
    return [
        r for r in fitting if not any(o.settings.keys() < r.settings.keys() and _dear(o) < _dear(r) for o in fitting)
    ]


def _several(some: list[Suggestion], count: int, key: Callable[[Suggestion], tuple[float, float]]) -> list[Suggestion]:
    """The first of each that change the same options; where those are too few, others of them that take another time."""
    some = sorted(some, key=key)
    first: dict[frozenset[str], Suggestion] = {}
    for remedy in some:
        first.setdefault(frozenset(remedy.settings), remedy)
    kept: dict[tuple[frozenset[str], float], Suggestion] = {}
    for remedy in [*first.values(), *some]:
        kept.setdefault((frozenset(remedy.settings), round(remedy.slower, 3)), remedy)
    return sorted(list(kept.values())[:count], key=key)


def _new(config: Config, settings: Settings) -> Settings:
    """Those that are not as they were."""
    then = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in settings}
    return {key: value for key, value in settings.items() if value != then[key]}


def _tried(found: Fit, settings: Settings, base: set[str], try_it: Callable[[Config], Fit]) -> Suggestion | None:
    variant = with_settings(found.config, settings)
    if set(check(without_data(variant), found.model)) - base:
        return None
    try:
        now = try_it(variant)
    except ConfigError:
        return None
    return Suggestion(settings, now, now.times.step / found.times.step)


def without_data(config: Config) -> Config:
    """Without data, which need not be here yet."""
    own = {
        name: dataclasses.replace(source, path="builtin:zigzag", split="train", subset="")
        for name, source in config.data.train.items()
    }
    return replace(config, data=DataConfig(train=own), eval=EvalConfig(every=config.eval.every))


def changes(f: Fit) -> Iterator[Settings]:
    """One step on from where it is, in each direction that saves memory or GPUs."""
    c, gpus = f.config, sum(n.gpus for n in f.nodes)
    p, r = c.policy, c.rollout
    longest = f.lengths.prompt + f.lengths.completion
    if c.sync.transport == "shared_memory" and len(f.nodes) > 1:
        yield {"sync.transport": "auto"}
    if not p.gradient_checkpointing:
        yield {"policy.gradient_checkpointing": True}
    for tokens in (p.tokens_per_pack // 2, p.tokens_per_pack // 4, longest):
        if longest <= tokens < p.tokens_per_pack:
            yield {"policy.tokens_per_pack": tokens}
    for chunk in (512, 256):
        if chunk < p.logprob_chunk:
            yield {"policy.logprob_chunk": chunk}
    for stage in range(p.zero_stage + 1, 4):
        yield {"policy.zero_stage": stage}
    if c.cluster.device == "gpu":
        if p.zero_stage and not p.offload_optimizer:
            yield {"policy.offload_optimizer": True}
        if p.zero_stage == 3 and not p.offload_params:
            yield {"policy.offload_params": True}
        if p.dtype == "float32":
            yield {"policy.dtype": "bfloat16"}
        if r.dtype == "float32":
            yield {"rollout.dtype": "bfloat16"}
        yield from _on_gpus(f, gpus)
    else:
        for engines in {r.engines // 2, 1} - {0, r.engines}:
            yield {"rollout.engines": engines}
        for ranks in {p.ranks // 2, 1} - {0, p.ranks}:
            yield {"policy.ranks": ranks}
        if (cache := _cache(f)) != r.kv_cache_mb:
            yield {"rollout.kv_cache_mb": cache}
    if r.max_sequences > 64:
        yield {"rollout.max_sequences": r.max_sequences // 2}


def _cache(f: Fit) -> int:
    """MiB of an engine's cache on CPU: the most that main memory has room for, and enough for one full sequence."""
    c, r = f.config, f.config.rollout
    enough = math.ceil(r.kv_cache_mb * (f.lengths.prompt + f.lengths.completion) / kv_cache_tokens(c, f.model, 0.0))
    most = r.kv_cache_mb
    for node, need, names in zip(f.nodes, f.host_bytes, f.layout.cpu_workers, strict=True):
        engines = sum(name.startswith("rollout") for name in names)
        if node.memory and engines:
            left = (1 - TIGHT) * node.memory - need
            most = min(most, int(r.kv_cache_mb + left // (engines * r.tensor_parallel * MIB)))
    return max(enough, most)


def _on_gpus(f: Fit, gpus: int) -> Iterator[Settings]:
    c, r = f.config, f.config.rollout
    colocated = c.cluster.placement == "colocated"
    for share in (0.9, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2):
        if share != r.gpu_memory and (colocated or share > r.gpu_memory):
            yield {"rollout.gpu_memory": share}
    if reference_gpus(c):
        yield {"reference.gpus": 0.0}
    left = {
        placement: gpus - count_other_gpus(with_settings(c, {"cluster.placement": placement}))
        for placement in ("separate", "colocated")
    }
    widths = [wide for wide in (1, 2, 4, 8) if wide != r.tensor_parallel and f.model.can_split(wide)]
    if colocated:
        yield from _shared(c, left["colocated"], widths)
        engines = max(1, left["separate"] // 2 // r.tensor_parallel)
        if (ranks := left["separate"] - engines * r.tensor_parallel) > 0:
            yield {"cluster.placement": "separate", "rollout.engines": engines, "policy.ranks": ranks}
        return
    for ranks in {critic_ranks(c) // 2, min(critic_ranks(c), 1)} - {0, critic_ranks(c)}:
        yield {"critic.ranks": ranks}
    yield from _apart(c, left["separate"], widths)
    for more in _shared(c, left["colocated"], []):
        yield more | {"cluster.placement": "colocated", "rollout.gpu_memory": min(r.gpu_memory, 0.5)}


def _shared(c: Config, gpus: int, widths: list[int]) -> Iterator[Settings]:
    """Engines and ranks on all of so many GPUs; or, as wide as one of `widths`, on as many as now."""
    for wide in [c.rollout.tensor_parallel, *widths]:
        for ranks in (gpus, c.policy.ranks):
            if ranks > 0 and ranks % wide == 0:
                engines = {"rollout.tensor_parallel": wide, "rollout.engines": ranks // wide, "policy.ranks": ranks}
                yield engines | ({"critic.ranks": min(critic_ranks(c), ranks)} if critic_ranks(c) else {})


def _apart(c: Config, gpus: int, widths: list[int]) -> Iterator[Settings]:
    """Engines on some of so many GPUs; ranks on what they leave, or as many as now."""
    r, now = c.rollout, c.policy.ranks
    for wide in [r.tensor_parallel, *widths]:
        most = r.engines * r.tensor_parallel // wide
        beside = min(most, (gpus - now) // wide)  # the ranks as they are
        some = {beside, 1}
        if wide == r.tensor_parallel:
            some |= {most, (most + beside) // 2, most // 2, most // 4}
        for engines in some:
            if engines > 0 and (left := gpus - engines * wide) > 0:
                for ranks in {left, min(left, now)}:
                    yield {"rollout.tensor_parallel": wide, "rollout.engines": engines, "policy.ranks": ranks}
