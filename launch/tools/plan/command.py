"""`rlsys plan`: what would be started where, whether it fits, how long a step would take, and what to change. Starts nothing."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from launch.printing import make_table, print_line
from launch.tools.plan import drawing
from launch.tools.plan.fit import TIGHT, Fit, check_fit, format_gib, format_size
from launch.tools.plan.lengths import LengthAssumption, LengthRequest, assume_lengths, with_length_limits
from launch.tools.plan.suggestions import Suggestion, suggest_changes, without_data
from rlsys.checks import check
from rlsys.config.schema import Config, ConfigError
from rlsys.estimates.batch_math import batch_rows
from rlsys.estimates.devices import GIB, GPUS, NodeSpec, parse_cluster, split_into_nodes
from rlsys.estimates.engine import kv_cache_tokens
from rlsys.estimates.host import usable_memory
from rlsys.estimates.memory import PARTS, Parts, SequenceLengths, total_bytes
from rlsys.models.lookup import find_model_shape, model_shape
from rlsys.models.shapes import ModelShape
from rlsys.rewards.settings import reward_services
from rlsys.runs.directory import write_user_file


@dataclass(frozen=True)
class PlanOptions:
    """`rlsys plan` as it was asked for."""

    cluster: str | None = None
    address: str | None = None
    measured: str | None = None
    model_config: str | None = None
    lengths: LengthRequest = field(default_factory=LengthRequest)
    json: str | None = None


@dataclass(frozen=True)
class PlanResult:
    """What came of it. `seconds` are by phase, where they are from a measurement."""

    path: str
    fit: Fit
    source: str  # of the model's shape
    where: str  # the nodes are from
    changes: Sequence[Suggestion]
    seconds: dict[str, float]
    lengths: LengthAssumption  # that the seconds are of
    unknown: list[str]  # what is not counted, and why

    @property
    def fits(self) -> bool:
        return self.fit.fits and not self.unknown


def plan(config: Config, path: str, wanted: PlanOptions, console: Console) -> int:
    """The exit code: 0 if it fits."""
    config = with_length_limits(config, wanted.lengths)
    try:
        model, source = model_shape(config.model.path, wanted.model_config or "")
    except ConfigError as error:
        raise ConfigError([*check(without_data(config)), *error.problems]) from None
    if problems := check(without_data(config), model):
        raise ConfigError(problems)
    allowed = assume_lengths(config, model, wanted.lengths)
    lengths, mean = SequenceLengths(allowed.prompt, allowed.longest), allowed.mean
    nodes, where = find_nodes(config, wanted)
    scorers, unknown = find_reward_models(config)
    found = check_fit(config, model, lengths, mean, nodes, scorers)
    changes = [] if found.fits else suggest_changes(found, lambda c: check_fit(c, model, lengths, mean, nodes, scorers))
    seconds: dict[str, float] = {}
    if wanted.measured:
        allowed = assume_lengths(config, model, wanted.lengths, Path(wanted.measured))
        seconds = measured_seconds(config, Path(wanted.measured), allowed)
    planned = PlanResult(path, found, source, where, changes, seconds, allowed, unknown)
    print_plan(planned, console)
    if wanted.json:
        write_user_file(Path(wanted.json), json.dumps(to_json(planned), indent=2) + "\n")
        print_line(console, f"figures: {wanted.json}")
    return 0 if planned.fits else 1


def find_reward_models(c: Config) -> tuple[dict[str, ModelShape], list[str]]:
    """Their shapes, by their paths, and of whom nothing is known."""
    known: dict[str, ModelShape] = {}
    unknown = []
    for path in dict.fromkeys(
        service.model_options.get("path", "") for service in reward_services(c) if service.model_options
    ):
        try:
            if found := find_model_shape(path):
                known[path] = found[0]
            else:
                unknown.append(
                    f"reward model {path}: its config.json is not on this machine, and its shape is not one of the usual ones. "
                    f"Of a hub name: hf download {path} config.json"
                )
        except ConfigError as error:
            unknown.append(f"reward model {error}")
    return known, unknown


# --- the cluster ------------------------------------------------------------------------------------------------------------


def find_nodes(c: Config, wanted: PlanOptions) -> tuple[list[NodeSpec], str]:
    """The nodes, and in words where they are from."""
    if wanted.address:
        from launch.tools.plan.live_cluster import query_nodes

        return query_nodes(wanted.address), f"the cluster at {wanted.address}, as far as it is free now"
    if wanted.cluster:
        return parse_cluster(wanted.cluster), f"--cluster {wanted.cluster}"
    if c.cluster.device == "cpu":
        return [this_machine()], "this machine"
    from launch.bundles import make_bundles

    gpu = GPUS["H100"]
    return split_into_nodes(
        max(math.ceil(sum(b.gpus for b in make_bundles(c, training=True))), 1), gpu
    ), f"as many {gpu.name} as it asks for; --cluster says otherwise"


def this_machine() -> NodeSpec:
    memory, _ = usable_memory()
    return NodeSpec(0, None, len(os.sched_getaffinity(0)), memory)


def measured_seconds(c: Config, source: Path, lengths: LengthAssumption) -> dict[str, float]:
    """Seconds of a step by phase, from what a run's or a benchmark's work has cost."""
    from launch.tools.plan import costs
    from launch.tools.plan.simulate import STEPS, SimulatedLoop
    from launch.tools.synthetic import CompletionLengths as Completions

    found = costs.read_costs(source, lengths.prompt, "--measured")
    loop = SimulatedLoop(without_data(c), found, Completions(lengths.mean, lengths.longest, c.run.seed), lengths.prompt)
    report = loop.run(STEPS)
    working = fmean(step.working for step in report.steps)
    waiting = max(report.seconds - working, 0.0)
    return {"rollout and rewards": waiting, "score, update, sync": working, "step": report.seconds}


# --- for people -------------------------------------------------------------------------------------------------------------


def print_plan(p: PlanResult, console: Console) -> None:
    f = p.fit
    print_line(console, f"{f.model.name}: {f.model.parameters:,} parameters, from {p.source}")
    print_line(console, f"{cluster_words(f.nodes)}: {p.where}\n")
    heading(console, "Where")
    drawing.draw_nodes(f, console)
    heading(console, "\nBatch")
    arithmetic = make_table("what")
    arithmetic.add_column("number", justify="right")
    arithmetic.add_column("from", style="dim", overflow="fold")
    limited = replace(f.config, rollout=replace(f.config.rollout, max_prompt_tokens=f.lengths.prompt))
    for what, how, number in batch_rows(limited):
        arithmetic.add_row(what, f"{number:,}", how)
    console.print(arithmetic)
    print_memory(f, console)
    print_disk(f, console)
    print_times(p, console)
    print_verdict(p, console)


def heading(console: Console, text: str) -> None:
    print_line(console, text, "bold")


def cluster_words(nodes: Sequence[NodeSpec]) -> str:
    gpus = sum(n.gpus for n in nodes)
    kinds = list(dict.fromkeys(n.gpu.name for n in nodes if n.gpu))
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    return f"{gpus} x {', '.join(kinds)} in {count}" if gpus else count


def print_memory(f: Fit, console: Console) -> None:
    """One column for each kind of process: at the moment when it needs most."""
    on_gpu = f.config.cluster.device == "gpu"
    columns: list[tuple[str, str, Parts]] = []
    for name, p in f.processes.items():
        moment, parts = p.peak(on_device=bool(p.device))
        if on_gpu and not p.device:
            continue
        columns.append((name, moment if len(p.device or p.host) > 1 else "always", parts))
    unit = "a GPU" if on_gpu else "a process"
    small = max(total_bytes(parts) for _, _, parts in columns) < 2 * GIB
    heading(console, f"\nMemory of {unit}, {'MiB' if small else 'GiB'}, at the moment when it needs most")

    def cell(size: float) -> str:
        if not size:
            return "–"
        size /= (1 << 20) if small else GIB
        return f"{size:.2f}" if abs(size) < 10 else f"{size:,.1f}"

    rows = make_table("part", *(name for name, _, _ in columns))
    rows.add_row("at", *(moment for _, moment, _ in columns), style="dim")
    for part in PARTS:
        if any(parts.get(part) for _, _, parts in columns):
            rows.add_row(part, *(cell(parts.get(part, 0.0)) for _, _, parts in columns))
    rows.add_row("together", *(cell(total_bytes(parts)) for _, _, parts in columns), style="bold")
    console.print(rows)
    if f.tightest and on_gpu:
        g = f.tightest
        left = g.capacity - g.needed
        said = (
            f"{format_gib(left)} GiB ({left / g.capacity:.0%}) left"
            if left >= 0
            else f"{format_gib(-left)} GiB too much"
        )
        print_line(
            console,
            f"fullest: {', '.join(g.workers)}: {format_gib(g.needed)} of {format_gib(g.capacity)} GiB at {g.moment}, {said}",
        )
    room = kv_cache_tokens(f.config, f.model, min((g.capacity for g in f.gpus), default=0.0))
    longest = f.lengths.prompt + f.lengths.completion
    print_line(
        console,
        f"KV cache of an engine: {room:,.0f} tokens, {room / longest:,.1f} full sequences of {longest:,}",
        "dim",
    )
    n = max(range(len(f.host_bytes)), key=lambda i: f.host_bytes[i])
    has = f" of {format_gib(f.nodes[n].memory)}" if f.nodes[n].memory else ""
    print_line(
        console,
        f"main memory of node {n}: {format_gib(f.host_bytes[n])} GiB{has} at most, every process counted whole",
        "dim",
    )


def print_disk(f: Fit, console: Console) -> None:
    d = f.disk
    heading(console, "\nDisk")
    critic = f", critic {format_size(d.critic)}" if d.critic else ""
    print_line(
        console,
        f"a checkpoint: {format_size(d.checkpoint)}: weights {format_size(d.weights)}, optimizer {format_size(d.optimizer)}{critic}",
    )
    keep = f.config.checkpoint.keep_last
    print_line(console, f"the run: {format_size(d.run)}, {d.checkpoints} at a time with checkpoint.keep_last {keep}")


def print_times(p: PlanResult, console: Console) -> None:
    f, seconds = p.fit, p.seconds
    if f.config.cluster.device == "gpu" and not any(node.gpus for node in f.nodes):
        return  # how fast would nothing be?
    if seconds:
        heading(console, "\nSeconds of a step, as work has cost in the run that was measured")
        found = {name: s for name, s in seconds.items() if name != "step"}
        step = seconds["step"]
    else:
        heading(console, "\nSeconds of a step: an ESTIMATE that may be off by a factor of two or more")
        found, step = f.times.phases, f.times.step
    print_line(console, p.lengths.description, "dim")
    rows = make_table("phase", "s", "share")
    for name, s in found.items():
        rows.add_row(name, f"{s:,.3g}", f"{s / step:.0%}" if step else "–")
    together = "step, rollout beside the rest" if f.times.overlapped and not seconds else "step"
    rows.add_row(together, f"{step:,.3g}", "", style="bold")
    console.print(rows)
    steps = f.config.trainer.steps
    print_line(
        console, f"{steps:,} steps: about {format_duration(step * steps)}, evaluations and checkpoints left out", "dim"
    )


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def print_verdict(p: PlanResult, console: Console) -> None:
    f, path, changes = p.fit, p.path, p.changes
    console.print()
    for reason in p.unknown:
        print_line(console, f"Not counted: {reason}", "yellow")
    if f.fits and p.unknown:
        print_line(console, f"Whether {path} fits is not known; all that is counted does.", "yellow")
        return
    if f.fits:
        tight = f.tightest
        if tight and tight.needed > (1 - TIGHT) * tight.capacity:
            print_line(
                console, f"✓ {path} fits, but tightly: less than {TIGHT:.0%} of GPU {tight.index} is left.", "yellow"
            )
        else:
            print_line(console, f"✓ {path} fits.", "green")
        return
    print_line(console, f"✗ {path} does not fit:", "red")
    for problem in f.problems:
        print_line(console, f"  {problem}")
    if not changes:
        print_line(
            console,
            "None of the changes that were tried fits on this cluster: it may take more, or larger GPUs, or a smaller model.",
        )
        return
    helps = changes[0].fit.fits
    print_line(
        console, "The cheapest changes with which it fits:" if helps else "Nothing small makes it fit; nearest come:"
    )
    for i, remedy in enumerate(changes, 1):
        slower = f"{remedy.slower - 1:+.0%} time of a step" if abs(remedy.slower - 1) >= 0.005 else "no slower"
        left = "" if helps else f", still {format_gib(remedy.fit.bytes_over)} GiB too much"
        print_line(console, f"  {i}. {remedy.text}  ({slower}, estimated{left})")


# --- for programs -----------------------------------------------------------------------------------------------------------


def to_json(p: PlanResult) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    f = p.fit
    return {
        "model": asdict(f.model) | {"parameters": f.model.parameters, "from": p.source},
        "lengths": asdict(f.lengths),
        "cluster": {"from": p.where, "nodes": [asdict(n) for n in f.nodes]},
        "placed": f.layout.gpus,
        "dealt": f.layout.cpu_workers,
        "missing": [asdict(m) for m in f.layout.missing],
        "batch": {what: number for what, _, number in batch_rows(f.config)},
        "memory": {
            name: {"count": p.count, "device": p.device, "host": p.host, "gpus": p.gpus}
            for name, p in f.processes.items()
        },
        "gpus": [
            {"node": g.node, "gpu": g.index, "members": g.workers, "moment": g.moment, "parts": g.parts}
            | {"need": g.needed, "capacity": g.capacity}
            for g in f.gpus
        ],
        "host": f.host_bytes,
        "disk": asdict(f.disk) | {"checkpoint": f.disk.checkpoint, "run": f.disk.run},
        "seconds": f.times.phases | {"step": f.times.step},
        "measured_seconds": p.seconds,
        "lengths_of_seconds": asdict(p.lengths),
        "fits": p.fits,
        "not_counted": p.unknown,
        "problems": f.problems,
        "changes": [
            {"set": r.settings, "fits": r.fit.fits, "slower": r.slower, "bytes_over": r.fit.bytes_over}
            for r in p.changes
        ],
    }
