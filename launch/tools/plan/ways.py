"""`rlsys plan --simulate`: how fast a configuration would be with other lags and placements, without running it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from launch.bundles import others
from launch.printing import say, table
from launch.tools.plan import costs
from launch.tools.plan.lengths import Asked, allowing, taken
from launch.tools.plan.remedies import bare
from launch.tools.plan.simulate import STEPS, Loop, Report
from launch.tools.synthetic import Lengths
from rlsys.checks import check
from rlsys.config.schema import Config, ConfigError
from rlsys.models.shapes import known
from rlsys.runs.directory import write_named

SHARES = (0.25, 0.5, 0.75)  # of the GPUs, that engines take
WAYS: list[tuple[int, bool, float]] = [  # pipeline.max_lag, pipeline.in_flight, rollout.oversample
    (0, False, 0.0),
    (1, False, 0.0),
    (2, False, 0.0),
    (1, True, 0.0),
    (2, True, 0.25),
]


@dataclass(frozen=True)
class Wanted:
    """`rlsys plan --simulate` as it was asked for."""

    costs: str
    gpus: int | None = None
    steps: int | None = None
    lengths: Asked = field(default_factory=Asked)
    json: str | None = None


def simulated(config: Config, wanted: Wanted, console: Console) -> None:
    config, model = allowing(config, wanted.lengths), known(config.model.path)
    if problems := check(bare(config), model):
        raise ConfigError(problems)
    source = Path(wanted.costs)
    lengths = taken(config, model, wanted.lengths, source)
    completions = Lengths(lengths.mean, lengths.longest, config.run.seed)
    reckoned = costs.read(source, lengths.prompt)
    variants = list(of(bare(config), wanted.gpus))
    found = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(variants))
        for variant in variants:
            loop = Loop(variant, reckoned, completions, lengths.prompt)
            found.append((variant, loop.run(wanted.steps or STEPS)))
            bar.advance(task)
    show(found, console)
    say(console, f"lengths: {lengths.said}", "dim")
    if config.dynamic_sampling.enabled:
        say(console, "dynamic_sampling is left out: every group is taken to teach something.", "dim")
    if wanted.json:
        told = {"costs": asdict(reckoned), "lengths": asdict(lengths), "ways": [figures(*one) for one in found]}
        write_named(Path(wanted.json), json.dumps(told, indent=2) + "\n")
        say(console, f"figures: {wanted.json}")


def of(config: Config, gpus: int | None) -> Iterator[Config]:
    """The configuration in its own way and others that it allows, on as many GPUs as it has or as are given."""
    own = (config.pipeline.max_lag, config.pipeline.in_flight, config.rollout.oversample)
    for placed in placements(config, gpus):
        for max_lag, in_flight, oversample in dict.fromkeys([own, *WAYS]):
            variant = replace(
                placed,
                pipeline=replace(placed.pipeline, max_lag=max_lag, in_flight=in_flight),
                rollout=replace(placed.rollout, oversample=oversample),
            )
            if not check(variant):
                yield variant


def placements(config: Config, gpus: int | None) -> Iterator[Config]:
    if gpus is None:
        yield config
        return
    wide = config.rollout.tensor_parallel
    shared, left = (gpus - others(placed(config, 1, 1, placement)) for placement in ("colocated", "separate"))
    if left < 2 * wide:
        beside = f": {gpus - left} are for others, and what is left" if left < gpus else ""
        raise ConfigError(f"--gpus {gpus}{beside} is less than two engines of rollout.tensor_parallel={wide} take.")
    if shared % wide == 0:
        yield placed(config, shared // wide, shared, "colocated")
    for share in SHARES:
        engines = max(1, round(left * share / wide))
        yield placed(config, engines, left - engines * wide, "separate")


def placed(config: Config, engines: int, ranks: int, placement: str) -> Config:
    return replace(
        config,
        cluster=replace(config.cluster, placement=placement, device="gpu"),
        rollout=replace(config.rollout, engines=engines, exact=False),
        policy=replace(config.policy, ranks=ranks),
    )


def show(found: list[tuple[Config, Report]], console: Console) -> None:
    shown = table("way", "engines", "ranks", "s/step", "samples/s", "lag", "idle", "seqs", "idle")
    best = max(r.speed for _, r in found)
    for c, r in found:
        shown.add_row(
            way(c),
            str(c.rollout.engines),
            "same" if c.cluster.placement == "colocated" else str(c.policy.ranks),
            f"{r.seconds:.3g}",
            f"{r.speed:,.1f}",
            f"{r.lag:.1f}",
            f"{r.engines_idle(c.rollout.engines):.0%}",
            f"{r.at_once(c.rollout.engines):.0f}",
            f"{r.ranks_idle:.0%}",
            style="bold" if r.speed == best else None,
        )
    console.print(shown)
    console.print()
    say(
        console,
        "way: pipeline.max_lag, pipeline.in_flight, rollout.oversample, CONFIG's own first; lag: of a step's oldest sample, on average.",
        "dim",
    )
    say(
        console,
        "idle: share of the time in which engines, and ranks, have nothing to do; seqs: that an engine decodes at once, on average.",
        "dim",
    )
    say(console, "Simulated: the network, and what roles on one machine take from each other, are left out.", "dim")


def figures(c: Config, r: Report) -> dict[str, Any]:
    return {
        "max_lag": c.pipeline.max_lag,
        "in_flight": c.pipeline.in_flight,
        "oversample": c.rollout.oversample,
        "placement": c.cluster.placement,
        "engines": c.rollout.engines,
        "ranks": c.policy.ranks,
        "step_s": r.seconds,
        "samples_per_s": r.speed,
        "lag": r.lag,
        "engines_idle_share": r.engines_idle(c.rollout.engines),
        "sequences_of_an_engine": r.at_once(c.rollout.engines),
        "ranks_idle_share": r.ranks_idle,
    }


def way(c: Config) -> str:
    """lag 2 in flight +25%"""
    more = f" +{c.rollout.oversample:.0%}" if c.rollout.oversample else ""
    return f"lag {c.pipeline.max_lag}{' in flight' * c.pipeline.in_flight}{more}"
