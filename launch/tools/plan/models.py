"""`rlsys plan --models`: which models a configuration trains on a cluster, and what each part of memory needs."""

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Column

from launch.printing import make_table, print_line, write_figures
from launch.tools.estimates.devices import GIB
from launch.tools.estimates.memory import PARTS, Moments, Parts
from launch.tools.fitting.fit import Fit, GpuUse
from launch.tools.plan.command import PlanOptions, check_model_shape, find_nodes, find_other_models, fit_cluster
from launch.tools.plan.lengths import assume_lengths, with_length_limits
from launch.tools.plan.report import describe_cluster
from launch.tools.plan.suggestions import Suggestion, suggest_changes
from rlsys.config.schema import Config

ROLES = {"policy": "policy-0", "engine": "rollout"}  # rank 0 sends the weights, so it needs most


@dataclass(frozen=True)
class ModelFit:
    """A model, and the first change that makes it fit if it does not."""

    fit: Fit
    change: Suggestion | None = None

    @property
    def verdict(self) -> str:
        return "yes" if self.fit.fits else "changed" if self.change else "no"


def compare_models(config: Config, names: list[str], options: PlanOptions, console: Console) -> int:
    """Returns the exit code: 0 if any of the models fits."""
    results = {name: fit_model(replace(config, model=replace(config.model, path=name)), options) for name in names}
    print_models(results, console)
    if options.json:
        write_figures(options.json, {name: to_json(result) for name, result in results.items()}, console)
    return 0 if any(result.fit.fits for result in results.values()) else 1


def fit_model(config: Config, options: PlanOptions) -> ModelFit:
    config = with_length_limits(config, options.lengths)
    model, _ = check_model_shape(config, options)
    lengths = assume_lengths(config, model, options.lengths)
    (nodes, _), (others, _) = find_nodes(config, options), find_other_models(config)

    def try_fit(variant: Config) -> Fit:
        return fit_cluster(variant, model, lengths, nodes, others)

    fit = try_fit(config)
    changes = [] if fit.fits else [c for c in suggest_changes(fit, try_fit, count=1) if c.fit.fits]
    return ModelFit(fit, changes[0] if changes else None)


def to_json(result: ModelFit) -> dict[str, Any]:
    """Sizes in bytes."""
    return {
        "parts": {role: largest_parts(result.fit, role) for role in ROLES},
        "fits": result.fit.fits,
        "problems": result.fit.problems,
        "change": result.change.settings if result.change else None,
    }


def largest_parts(f: Fit, role: str) -> Parts:
    """Each part at the moment when it is largest: not all are at the same moment."""
    process = f.processes[ROLES[role]]
    moments: Moments = process.device or process.host
    return {part: size for part in PARTS if (size := max(parts.get(part, 0.0) for parts in moments.values()))}


def print_models(results: dict[str, ModelFit], console: Console) -> None:
    fits = {name: result.fit for name, result in results.items()}
    print_line(
        console, f"{describe_cluster(next(iter(fits.values())).nodes)}, GiB of a process for each part at most\n"
    )
    columns = [Column(name.rpartition("/")[2], justify="right", overflow="fold") for name in fits]
    table = make_table("part", *columns)
    for role in ROLES:
        parts = {name: largest_parts(f, role) for name, f in fits.items()}
        for part in PARTS:
            if any(parts[name].get(part) for name in fits):
                table.add_row(f"{role}: {part}", *(format_size(parts[name].get(part, 0.0)) for name in fits))
    uses: list[GpuUse | None] = [f.tightest for f in fits.values()]
    if any(uses):
        table.add_row("fullest GPU at", *(use.moment if use else "–" for use in uses), style="dim")
        table.add_row("together", *(format_size(use.needed) if use else "–" for use in uses), style="bold")
    table.add_row("fits", *(result.verdict for result in results.values()), style="bold")
    console.print(table)
    for name, result in results.items():
        if result.change:
            print_line(console, f"{name} fits with {result.change.text}")
        elif not result.fit.fits:
            print_line(console, f"✗ {name}: {' '.join(result.fit.problems)}")


def format_size(size: float) -> str:
    size /= GIB
    return "–" if not size else f"{size:.2f}" if abs(size) < 10 else f"{size:,.1f}"
