"""What could be changed of a configuration that does not fit: real variants of it, tried by the same arithmetic and by `check`."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.plan.fit import Fit
from rlsys.config import Config, ConfigError, Data, Eval
from rlsys.config_check import check

DEPTH = 4  # changes together
BEAM = 10  # of the variants that are still too large, those that go on
Settings = dict[str, Any]


@dataclass(frozen=True)
class Remedy:
    """`Remedy({"policy.zero_stage": 3}, fit, slower=1.04)`"""

    settings: Settings
    fit: Fit
    slower: float  # estimated seconds of a step, over those without it

    @property
    def words(self) -> str:
        return " ".join(f"{key}={_written(value)}" for key, value in self.settings.items())


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def changed(config: Config, settings: Settings) -> Config:
    for key, value in settings.items():
        section, option = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def remedies(found: Fit, try_it: Callable[[Config], Fit], count: int = 3) -> list[Remedy]:
    """The cheapest first. Where nothing does, those that come nearest."""
    base = set(check(bare(found.config)))
    fitting: list[Remedy] = []
    front = [Remedy({}, found, 1.0)]
    nearest: list[Remedy] = []
    seen: set[frozenset[tuple[str, Any]]] = set()
    for _ in range(DEPTH):
        tried: list[Remedy] = []
        for before in front:
            for more in changes(before.fit):
                settings = _new(found.config, before.settings | more)
                key = frozenset(settings.items())
                if key in seen or any(r.settings.items() <= settings.items() for r in fitting):
                    continue
                seen.add(key)
                if remedy := _tried(found, settings, base, try_it):
                    (fitting if remedy.fit.fits else tried).append(remedy)
        better = [r for r in tried if r.fit.over < found.over]
        front = sorted(better, key=lambda r: (r.fit.over, r.slower))[:BEAM]
        nearest = sorted([*nearest, *front], key=lambda r: (r.fit.over, r.slower))
        if len(_different(fitting)) >= count or not front:
            break
    fitting = [simplest(found, r, base, try_it) for r in fitting]
    fitting.sort(key=lambda r: (round(r.slower, 3), len(r.settings)))
    return _different(fitting)[:count] or _different(nearest)[:count]


def simplest(found: Fit, remedy: Remedy, base: set[str], try_it: Callable[[Config], Fit]) -> Remedy:
    """Without what it does not need: one step may have undone what another was for."""
    for key in list(remedy.settings):
        fewer = {k: v for k, v in remedy.settings.items() if k != key}
        if fewer and (now := _tried(found, fewer, base, try_it)) and now.fit.fits:
            remedy = now
    return remedy


def _different(some: list[Remedy]) -> list[Remedy]:
    """The first of those that change the same options."""
    kept: dict[frozenset[str], Remedy] = {}
    for remedy in some:
        kept.setdefault(frozenset(remedy.settings), remedy)
    return list(kept.values())


def _new(config: Config, settings: Settings) -> Settings:
    """Those that are not as they were."""
    then = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in settings}
    return {key: value for key, value in settings.items() if value != then[key]}


def _tried(found: Fit, settings: Settings, base: set[str], try_it: Callable[[Config], Fit]) -> Remedy | None:
    variant = changed(found.config, settings)
    if set(check(bare(variant))) - base:
        return None
    try:
        now = try_it(variant)
    except ConfigError:
        return None
    return Remedy(settings, now, now.times.step / found.times.step)


def bare(config: Config) -> Config:
    """Without data, which need not be here yet."""
    own = {
        name: dataclasses.replace(source, path="builtin:zigzag", split="train", subset="")
        for name, source in config.data.train.items()
    }
    return replace(config, data=Data(train=own), eval=Eval(every=config.eval.every))


def changes(f: Fit) -> Iterator[Settings]:
    """One step on from where it is, in each direction that saves memory or GPUs."""
    c, gpus = f.config, sum(n.gpus for n in f.nodes)
    p, r = c.policy, c.rollout
    longest = f.lengths.prompt + f.lengths.new
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
    if p.zero_stage and not p.offload_optimizer:
        yield {"policy.offload_optimizer": True}
    if p.zero_stage == 3 and not p.offload_params:
        yield {"policy.offload_params": True}
    if c.cluster.device == "gpu":
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
        if f.lengths.prompt + f.lengths.new > 0:
            yield {"rollout.kv_cache_mb": r.kv_cache_mb * 2}
    if r.max_sequences > 64:
        yield {"rollout.max_sequences": r.max_sequences // 2}


def _on_gpus(f: Fit, gpus: int) -> Iterator[Settings]:
    c = f.config
    p, r = c.policy, c.rollout
    colocated = c.cluster.placement == "colocated"
    for share in (0.9, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2):
        if share != r.gpu_memory and (colocated or share > r.gpu_memory):
            yield {"rollout.gpu_memory": share}
    if colocated:
        if p.ranks < gpus and gpus % r.tensor_parallel == 0:
            yield {"rollout.engines": gpus // r.tensor_parallel, "policy.ranks": gpus}
        for wide in (2, 4, 8):
            if wide > r.tensor_parallel and p.ranks % wide == 0:
                yield {"rollout.tensor_parallel": wide, "rollout.engines": p.ranks // wide}
        if c.algorithm.advantage != "gae" and gpus >= 2:
            yield {"cluster.placement": "separate", "rollout.engines": gpus // 2, "policy.ranks": gpus - gpus // 2}
        return
    for wide in (2, 4, 8):
        engines = max(1, r.engines * r.tensor_parallel // wide)
        if wide > r.tensor_parallel and engines * wide + p.ranks <= gpus:
            yield {"rollout.tensor_parallel": wide, "rollout.engines": engines}
    for engines in {r.engines // 2, r.engines // 4, 1} - {0, r.engines}:
        ranks = gpus - engines * r.tensor_parallel
        if ranks > 0:
            yield (
                {"rollout.engines": engines, "policy.ranks": ranks}
                if ranks != p.ranks
                else {"rollout.engines": engines}
            )
    if gpus - r.engines * r.tensor_parallel not in (p.ranks, 0) and gpus > r.engines * r.tensor_parallel:
        yield {"policy.ranks": gpus - r.engines * r.tensor_parallel}
    if gpus % r.tensor_parallel == 0 and not c.pipeline.max_lag:
        yield {
            "cluster.placement": "colocated",
            "rollout.engines": gpus // r.tensor_parallel,
            "policy.ranks": gpus,
            "rollout.gpu_memory": min(r.gpu_memory, 0.5),
        }
