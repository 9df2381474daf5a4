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

from launch.printing import say, table
from launch.tools.plan import drawing
from launch.tools.plan.fit import TIGHT, Fit, fit, gib, size
from launch.tools.plan.lengths import Asked, Taken, allowing, taken
from launch.tools.plan.remedies import Remedy, bare, remedies
from rlsys.checks import check
from rlsys.config.schema import Config, ConfigError
from rlsys.estimates.batch_math import batch_arithmetic
from rlsys.estimates.devices import GIB, GPUS, Node, cluster, nodes_of
from rlsys.estimates.host import main_memory
from rlsys.estimates.memory import PARTS, Lengths, Parts, cache_tokens, total
from rlsys.models.shapes import Model, here, model_of
from rlsys.rewards.settings import services
from rlsys.runs.directory import write_named


@dataclass(frozen=True)
class Wanted:
    """`rlsys plan` as it was asked for."""

    cluster: str | None = None
    address: str | None = None
    measured: str | None = None
    model_config: str | None = None
    lengths: Asked = field(default_factory=Asked)
    json: str | None = None


@dataclass(frozen=True)
class Planned:
    """What came of it. `seconds` are by phase, where they are from a measurement."""

    path: str
    fit: Fit
    source: str  # of the model's shape
    where: str  # the nodes are from
    changes: Sequence[Remedy]
    seconds: dict[str, float]
    lengths: Taken  # that the seconds are of
    unknown: list[str]  # what is not counted, and why

    @property
    def fits(self) -> bool:
        return self.fit.fits and not self.unknown


def plan(config: Config, path: str, wanted: Wanted, console: Console) -> int:
    """The exit code: 0 if it fits."""
    config = allowing(config, wanted.lengths)
    try:
        model, source = model_of(config.model.path, wanted.model_config or "")
    except ConfigError as error:
        raise ConfigError([*check(bare(config)), *error.problems]) from None
    if problems := check(bare(config), model):
        raise ConfigError(problems)
    allowed = taken(config, model, wanted.lengths)
    lengths, mean = Lengths(allowed.prompt, allowed.longest), allowed.mean
    nodes, where = nodes_for(config, wanted)
    scorers, unknown = reward_models(config)
    found = fit(config, model, lengths, mean, nodes, scorers)
    changes = [] if found.fits else remedies(found, lambda c: fit(c, model, lengths, mean, nodes, scorers))
    seconds: dict[str, float] = {}
    if wanted.measured:
        allowed = taken(config, model, wanted.lengths, Path(wanted.measured))
        seconds = measured(config, Path(wanted.measured), allowed)
    planned = Planned(path, found, source, where, changes, seconds, allowed, unknown)
    show(planned, console)
    if wanted.json:
        write_named(Path(wanted.json), json.dumps(figures(planned), indent=2) + "\n")
        say(console, f"figures: {wanted.json}")
    return 0 if planned.fits else 1


def reward_models(c: Config) -> tuple[dict[str, Model], list[str]]:
    """Their shapes, by their paths, and of whom nothing is known."""
    known: dict[str, Model] = {}
    unknown = []
    for path in dict.fromkeys(service.model.get("path", "") for service in services(c) if service.model):
        try:
            if found := here(path):
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


def nodes_for(c: Config, wanted: Wanted) -> tuple[list[Node], str]:
    """The nodes, and in words where they are from."""
    if wanted.address:
        from launch.tools.plan.live import nodes_at

        return nodes_at(wanted.address), f"the cluster at {wanted.address}, as far as it is free now"
    if wanted.cluster:
        return cluster(wanted.cluster), f"--cluster {wanted.cluster}"
    if c.cluster.device == "cpu":
        return [this_machine()], "this machine"
    from launch.bundles import bundles

    gpu = GPUS["H100"]
    return nodes_of(
        max(math.ceil(sum(b.gpus for b in bundles(c, training=True))), 1), gpu
    ), f"as many {gpu.name} as it asks for; --cluster says otherwise"


def this_machine() -> Node:
    memory, _ = main_memory()
    return Node(0, None, len(os.sched_getaffinity(0)), memory)


def measured(c: Config, source: Path, lengths: Taken) -> dict[str, float]:
    """Seconds of a step by phase, from what a run's or a benchmark's work has cost."""
    from launch.tools.plan import costs
    from launch.tools.plan.simulate import STEPS, Loop
    from launch.tools.synthetic import Lengths as Completions

    found = costs.read(source, lengths.prompt, "--measured")
    loop = Loop(bare(c), found, Completions(lengths.mean, lengths.longest, c.run.seed), lengths.prompt)
    report = loop.run(STEPS)
    working = fmean(step.working for step in report.steps)
    waiting = max(report.seconds - working, 0.0)
    return {"rollout and rewards": waiting, "score, update, sync": working, "step": report.seconds}


# --- for people -------------------------------------------------------------------------------------------------------------


def show(p: Planned, console: Console) -> None:
    f = p.fit
    say(console, f"{f.model.name}: {f.model.parameters:,} parameters, from {p.source}")
    say(console, f"{cluster_words(f.nodes)}: {p.where}\n")
    heading(console, "Where")
    drawing.nodes(f, console)
    heading(console, "\nBatch")
    arithmetic = table("what")
    arithmetic.add_column("number", justify="right")
    arithmetic.add_column("from", style="dim", overflow="fold")
    limited = replace(f.config, rollout=replace(f.config.rollout, max_prompt_tokens=f.lengths.prompt))
    for what, how, number in batch_arithmetic(limited):
        arithmetic.add_row(what, f"{number:,}", how)
    console.print(arithmetic)
    memory(f, console)
    on_disk(f, console)
    times(p, console)
    verdict(p, console)


def heading(console: Console, text: str) -> None:
    say(console, text, "bold")


def cluster_words(nodes: Sequence[Node]) -> str:
    gpus = sum(n.gpus for n in nodes)
    kinds = list(dict.fromkeys(n.gpu.name for n in nodes if n.gpu))
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    return f"{gpus} x {', '.join(kinds)} in {count}" if gpus else count


def memory(f: Fit, console: Console) -> None:
    """One column for each kind of process: at the moment when it needs most."""
    on_gpu = f.config.cluster.device == "gpu"
    columns: list[tuple[str, str, Parts]] = []
    for name, p in f.processes.items():
        moment, parts = p.peak(of_device=bool(p.device))
        if on_gpu and not p.device:
            continue
        columns.append((name, moment if len(p.device or p.host) > 1 else "always", parts))
    unit = "a GPU" if on_gpu else "a process"
    small = max(total(parts) for _, _, parts in columns) < 2 * GIB
    heading(console, f"\nMemory of {unit}, {'MiB' if small else 'GiB'}, at the moment when it needs most")

    def cell(size: float) -> str:
        if not size:
            return "–"
        size /= (1 << 20) if small else GIB
        return f"{size:.2f}" if abs(size) < 10 else f"{size:,.1f}"

    rows = table("part", *(name for name, _, _ in columns))
    rows.add_row("at", *(moment for _, moment, _ in columns), style="dim")
    for part in PARTS:
        if any(parts.get(part) for _, _, parts in columns):
            rows.add_row(part, *(cell(parts.get(part, 0.0)) for _, _, parts in columns))
    rows.add_row("together", *(cell(total(parts)) for _, _, parts in columns), style="bold")
    console.print(rows)
    if f.tightest and on_gpu:
        g = f.tightest
        left = g.capacity - g.need
        said = f"{gib(left)} GiB ({left / g.capacity:.0%}) left" if left >= 0 else f"{gib(-left)} GiB too much"
        say(console, f"fullest: {', '.join(g.members)}: {gib(g.need)} of {gib(g.capacity)} GiB at {g.moment}, {said}")
    room = cache_tokens(f.config, f.model, min((g.capacity for g in f.gpus), default=0.0))
    longest = f.lengths.prompt + f.lengths.new
    say(
        console,
        f"KV cache of an engine: {room:,.0f} tokens, {room / longest:,.1f} full sequences of {longest:,}",
        "dim",
    )
    n = max(range(len(f.host)), key=lambda i: f.host[i])
    has = f" of {gib(f.nodes[n].memory)}" if f.nodes[n].memory else ""
    say(console, f"main memory of node {n}: {gib(f.host[n])} GiB{has} at most, every process counted whole", "dim")


def on_disk(f: Fit, console: Console) -> None:
    d = f.disk
    heading(console, "\nDisk")
    critic = f", critic {size(d.critic)}" if d.critic else ""
    say(
        console, f"a checkpoint: {size(d.checkpoint)}: weights {size(d.weights)}, optimizer {size(d.optimizer)}{critic}"
    )
    keep = f.config.checkpoint.keep_last
    say(console, f"the run: {size(d.run)}, {d.kept} at a time with checkpoint.keep_last {keep}")


def times(p: Planned, console: Console) -> None:
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
    say(console, p.lengths.said, "dim")
    rows = table("phase", "s", "share")
    for name, s in found.items():
        rows.add_row(name, f"{s:,.3g}", f"{s / step:.0%}" if step else "–")
    together = "step, rollout beside the rest" if f.times.overlapped and not seconds else "step"
    rows.add_row(together, f"{step:,.3g}", "", style="bold")
    console.print(rows)
    steps = f.config.trainer.steps
    say(console, f"{steps:,} steps: about {duration(step * steps)}, evaluations and checkpoints left out", "dim")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def verdict(p: Planned, console: Console) -> None:
    f, path, changes = p.fit, p.path, p.changes
    console.print()
    for reason in p.unknown:
        say(console, f"Not counted: {reason}", "yellow")
    if f.fits and p.unknown:
        say(console, f"Whether {path} fits is not known; all that is counted does.", "yellow")
        return
    if f.fits:
        tight = f.tightest
        if tight and tight.need > (1 - TIGHT) * tight.capacity:
            say(console, f"✓ {path} fits, but tightly: less than {TIGHT:.0%} of GPU {tight.index} is left.", "yellow")
        else:
            say(console, f"✓ {path} fits.", "green")
        return
    say(console, f"✗ {path} does not fit:", "red")
    for problem in f.problems:
        say(console, f"  {problem}")
    if not changes:
        say(
            console,
            "None of the changes that were tried fits on this cluster: it may take more, or larger GPUs, or a smaller model.",
        )
        return
    helps = changes[0].fit.fits
    say(console, "The cheapest changes with which it fits:" if helps else "Nothing small makes it fit; nearest come:")
    for i, remedy in enumerate(changes, 1):
        slower = f"{remedy.slower - 1:+.0%} time of a step" if abs(remedy.slower - 1) >= 0.005 else "no slower"
        left = "" if helps else f", still {gib(remedy.fit.over)} GiB too much"
        say(console, f"  {i}. {remedy.words}  ({slower}, estimated{left})")


# --- for programs -----------------------------------------------------------------------------------------------------------


def figures(p: Planned) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    f = p.fit
    return {
        "model": asdict(f.model) | {"parameters": f.model.parameters, "from": p.source},
        "lengths": asdict(f.lengths),
        "cluster": {"from": p.where, "nodes": [asdict(n) for n in f.nodes]},
        "placed": f.placed.gpus,
        "dealt": f.placed.dealt,
        "missing": [asdict(m) for m in f.placed.missing],
        "batch": {what: number for what, _, number in batch_arithmetic(f.config)},
        "memory": {
            name: {"count": p.count, "device": p.device, "host": p.host, "gpus": p.gpus}
            for name, p in f.processes.items()
        },
        "gpus": [
            {"node": g.node, "gpu": g.index, "members": g.members, "moment": g.moment, "parts": g.parts}
            | {"need": g.need, "capacity": g.capacity}
            for g in f.gpus
        ],
        "host": f.host,
        "disk": asdict(f.disk) | {"checkpoint": f.disk.checkpoint, "run": f.disk.run},
        "seconds": f.times.phases | {"step": f.times.step},
        "measured_seconds": p.seconds,
        "lengths_of_seconds": asdict(p.lengths),
        "fits": p.fits,
        "not_counted": p.unknown,
        "problems": f.problems,
        "changes": [
            {"set": r.settings, "fits": r.fit.fits, "slower": r.slower, "bytes_over": r.fit.over} for r in p.changes
        ],
    }
