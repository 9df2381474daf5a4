"""`rlsys plan --simulate`: how fast a configuration would be with other lags and placements, without running it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from launch.bundles import count_other_gpus
from launch.printing import make_table, print_line
from launch.tools.plan import costs
from launch.tools.plan.lengths import LengthRequest, assume_lengths, with_length_limits
from launch.tools.plan.simulate import STEPS, SimulatedLoop, SimulationReport
from launch.tools.plan.suggestions import without_data
from launch.tools.synthetic import CompletionLengths
from rlsys.checks import check
from rlsys.config.schema import Config, ConfigError
from rlsys.models.lookup import known_model_shape
from rlsys.runs.directory import write_user_file

SHARES = (0.25, 0.5, 0.75)  # of the GPUs, that engines take
SCHEDULES: list[tuple[int, bool, float]] = [  # pipeline.max_lag, pipeline.in_flight, rollout.oversample
    (0, False, 0.0),
    (1, False, 0.0),
    (2, False, 0.0),
    (1, True, 0.0),
    (2, True, 0.25),
]


@dataclass(frozen=True)
class SimulateOptions:
    """`rlsys plan --simulate` as it was asked for."""

    costs: str
    gpus: int | None = None
    steps: int | None = None
    lengths: LengthRequest = field(default_factory=LengthRequest)
    json: str | None = None


def compare_variants(config: Config, wanted: SimulateOptions, console: Console) -> None:
    config, model = with_length_limits(config, wanted.lengths), known_model_shape(config.model.path)
    if problems := check(without_data(config), model):
        raise ConfigError(problems)
    source = Path(wanted.costs)
    lengths = assume_lengths(config, model, wanted.lengths, source)
    completions = CompletionLengths(lengths.mean, lengths.longest, config.run.seed)
    reckoned = costs.read_costs(source, lengths.prompt)
    variants = list(make_variants(without_data(config), wanted.gpus))
    found = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(variants))
        for variant in variants:
            loop = SimulatedLoop(variant, reckoned, completions, lengths.prompt)
            found.append((variant, loop.run(wanted.steps or STEPS)))
            bar.advance(task)
    print_variants(found, console)
    print_line(console, f"lengths: {lengths.description}", "dim")
    if config.dynamic_sampling.enabled:
        print_line(console, "dynamic_sampling is left out: every group is taken to teach something.", "dim")
    if wanted.json:
        told = {"costs": asdict(reckoned), "lengths": asdict(lengths), "ways": [figures(*one) for one in found]}
        write_user_file(Path(wanted.json), json.dumps(told, indent=2) + "\n")
        print_line(console, f"figures: {wanted.json}")


def make_variants(config: Config, gpus: int | None) -> Iterator[Config]:
    """The configuration in its own way and others that it allows, on as many GPUs as it has or as are given."""
    own = (config.pipeline.max_lag, config.pipeline.in_flight, config.rollout.oversample)
    for placed in make_placements(config, gpus):
        for max_lag, in_flight, oversample in dict.fromkeys([own, *SCHEDULES]):
            variant = replace(
                placed,
                pipeline=replace(placed.pipeline, max_lag=max_lag, in_flight=in_flight),
                rollout=replace(placed.rollout, oversample=oversample),
            )
            if not check(variant):
                yield variant


def make_placements(config: Config, gpus: int | None) -> Iterator[Config]:
    if gpus is None:
        yield config
        return
    wide = config.rollout.tensor_parallel
    shared, left = (
        gpus - count_other_gpus(with_placement(config, 1, 1, placement)) for placement in ("colocated", "separate")
    )
    if left < 2 * wide:
        beside = f": {gpus - left} are for others, and what is left" if left < gpus else ""
        raise ConfigError(f"--gpus {gpus}{beside} is less than two engines of rollout.tensor_parallel={wide} take.")
    if shared % wide == 0:
        yield with_placement(config, shared // wide, shared, "colocated")
    for share in SHARES:
        engines = max(1, round(left * share / wide))
        yield with_placement(config, engines, left - engines * wide, "separate")


def with_placement(config: Config, engines: int, ranks: int, placement: str) -> Config:
    return replace(
        config,
        cluster=replace(config.cluster, placement=placement, device="gpu"),
        rollout=replace(config.rollout, engines=engines, exact=False),
        policy=replace(config.policy, ranks=ranks),
    )


def print_variants(found: list[tuple[Config, SimulationReport]], console: Console) -> None:
    shown = make_table("way", "engines", "ranks", "s/step", "samples/s", "lag", "idle", "seqs", "idle")
    best = max(r.samples_per_second for _, r in found)
    for c, r in found:
        shown.add_row(
            describe_schedule(c),
            str(c.rollout.engines),
            "same" if c.cluster.placement == "colocated" else str(c.policy.ranks),
            f"{r.seconds:.3g}",
            f"{r.samples_per_second:,.1f}",
            f"{r.lag:.1f}",
            f"{r.engines_idle(c.rollout.engines):.0%}",
            f"{r.sequences_per_engine(c.rollout.engines):.0f}",
            f"{r.ranks_idle:.0%}",
            style="bold" if r.samples_per_second == best else None,
        )
    console.print(shown)
    console.print()
    print_line(
        console,
        "way: pipeline.max_lag, pipeline.in_flight, rollout.oversample, CONFIG's own first; lag: of a step's oldest sample, on average.",
        "dim",
    )
    print_line(
        console,
        "idle: share of the time in which engines, and ranks, have nothing to do; seqs: that an engine decodes at once, on average.",
        "dim",
    )
    print_line(
        console, "Simulated: the network, and what roles on one machine take from each other, are left out.", "dim"
    )


def figures(c: Config, r: SimulationReport) -> dict[str, Any]:
    return {
        "max_lag": c.pipeline.max_lag,
        "in_flight": c.pipeline.in_flight,
        "oversample": c.rollout.oversample,
        "placement": c.cluster.placement,
        "engines": c.rollout.engines,
        "ranks": c.policy.ranks,
        "step_s": r.seconds,
        "samples_per_s": r.samples_per_second,
        "lag": r.lag,
        "engines_idle_share": r.engines_idle(c.rollout.engines),
        "sequences_of_an_engine": r.sequences_per_engine(c.rollout.engines),
        "ranks_idle_share": r.ranks_idle,
    }


def describe_schedule(c: Config) -> str:
    """lag 2 in flight +25%"""
    more = f" +{c.rollout.oversample:.0%}" if c.rollout.oversample else ""
    return f"lag {c.pipeline.max_lag}{' in flight' * c.pipeline.in_flight}{more}"
