"""`rlsys plan --simulate`: compares the speed of a configuration with other lags and placements, without running it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from launch.bundles import count_other_gpus
from launch.printing import make_table, print_line, write_figures
from launch.tools.plan import costs
from launch.tools.plan.lengths import LengthRequest, assume_lengths, with_length_limits
from launch.tools.plan.simulate import STEPS, SimulatedLoop, SimulationReport
from launch.tools.plan.suggestions import without_data
from launch.tools.synthetic import CompletionLengths
from rlsys.checks import check
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.lookup import known_model_shape

SHARES = (0.25, 0.5, 0.75)  # of the GPUs, for engines
SCHEDULES: list[tuple[int, bool, float]] = [  # pipeline.max_lag, pipeline.in_flight, rollout.oversample
    (0, False, 0.0),
    (1, False, 0.0),
    (2, False, 0.0),
    (1, True, 0.0),
    (2, True, 0.25),
]


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `rlsys plan --simulate`."""

    costs: str
    gpus: int | None = None
    steps: int | None = None
    lengths: LengthRequest = field(default_factory=LengthRequest)
    json: str | None = None


def compare_variants(config: Config, options: SimulateOptions, console: Console) -> None:
    config, model = with_length_limits(config, options.lengths), known_model_shape(config.model.path)
    if problems := check(without_data(config), model):
        raise ConfigError(problems)
    source = Path(options.costs)
    lengths = assume_lengths(config, model, options.lengths, source)
    completions = CompletionLengths(lengths.mean, lengths.longest, config.run.seed)
    measured = costs.read_costs(source, lengths.typical_prompt)
    variants = list(make_variants(without_data(config), options.gpus))
    reports = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(variants))
        for variant in variants:
            loop = SimulatedLoop(variant, measured, completions, lengths.typical_prompt)
            reports.append((variant, loop.run(options.steps or STEPS)))
            bar.advance(task)
    print_variants(reports, console)
    print_line(console, f"lengths: {lengths.description}", "dim")
    if config.dynamic_sampling.enabled:
        print_line(console, "dynamic_sampling is left out: no group is dropped.", "dim")
    if options.json:
        variants_json = [to_json(variant, report) for variant, report in reports]
        figures = {"costs": asdict(measured), "lengths": asdict(lengths), "ways": variants_json}
        write_figures(options.json, figures, console)


def make_variants(config: Config, gpus: int | None) -> Iterator[Config]:
    """The configuration with its own schedule first, and then with others, in each placement."""
    configured = (config.pipeline.max_lag, config.pipeline.in_flight, config.rollout.oversample)
    for placement in make_placements(config, gpus):
        for max_lag, in_flight, oversample in dict.fromkeys([configured, *SCHEDULES]):
            variant = replace(
                placement,
                pipeline=replace(placement.pipeline, max_lag=max_lag, in_flight=in_flight),
                rollout=replace(placement.rollout, oversample=oversample),
            )
            if not check(variant):
                yield variant


def make_placements(config: Config, gpus: int | None) -> Iterator[Config]:
    """The configuration's own placement; with a number of GPUs, colocated and separate ones on as many."""
    if gpus is None:
        yield config
        return
    wide = config.rollout.tensor_parallel
    colocated, separate = (
        gpus - count_other_gpus(with_placement(config, 1, 1, placement)) for placement in ("colocated", "separate")
    )
    if separate < 2 * wide:
        others = f": {gpus - separate} are for others, and what is left" if separate < gpus else ""
        raise ConfigError(f"--gpus {gpus}{others} is less than two engines of rollout.tensor_parallel={wide} take.")
    if colocated % wide == 0:
        yield with_placement(config, colocated // wide, colocated, "colocated")
    for share in SHARES:
        engines = max(1, round(separate * share / wide))
        yield with_placement(config, engines, separate - engines * wide, "separate")


def with_placement(config: Config, engines: int, ranks: int, placement: str) -> Config:
    return replace(
        config,
        cluster=replace(config.cluster, placement=placement),
        rollout=replace(config.rollout, engines=engines),
        policy=replace(config.policy, ranks=ranks),
    )


NOTES = (
    "way: pipeline.max_lag, pipeline.in_flight, rollout.oversample, those of CONFIG first.",
    "lag: of the oldest sample of a step, on average.",
    "idle: share of the time without work, first of the engines, then of the ranks.",
    "seqs: sequences that an engine decodes at once, on average.",
    "Simulated: without the network, and as if processes on one machine did not slow each other down.",
)


def print_variants(reports: list[tuple[Config, SimulationReport]], console: Console) -> None:
    table = make_table("way", "engines", "ranks", "s/step", "samples/s", "lag", "idle", "seqs", "idle")
    best = max(r.samples_per_second for _, r in reports)
    for c, r in reports:
        table.add_row(
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
    console.print(table)
    console.print()
    for note in NOTES:
        print_line(console, note, "dim")


def to_json(c: Config, r: SimulationReport) -> dict[str, Any]:
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
    """`lag 2 in flight +25%`"""
    more = f" +{c.rollout.oversample:.0%}" if c.rollout.oversample else ""
    return f"lag {c.pipeline.max_lag}{' in flight' * c.pipeline.in_flight}{more}"
