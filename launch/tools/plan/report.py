"""Prints a plan: where workers run, memory, disk, time, and what to change. `to_json` has the same for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from launch.printing import make_table, print_line
from launch.tools.estimates.batch_math import batch_rows
from launch.tools.estimates.devices import GIB, NodeSpec
from launch.tools.estimates.engine import kv_cache_tokens, most_sequences
from launch.tools.estimates.memory import PARTS, Parts, total_bytes
from launch.tools.fitting.fit import TIGHT, Fit
from launch.tools.fitting.formatting import format_duration, format_gib, format_size
from launch.tools.plan import drawing
from launch.tools.plan.lengths import LengthAssumption
from launch.tools.plan.longest import MEMORY, LongestSequences
from launch.tools.plan.offloads import Offload
from launch.tools.plan.suggestions import Suggestion
from launch.tools.validate import batch_table
from rlsys.config.derived import has_engines


@dataclass(frozen=True)
class PlanResult:
    """A plan. `seconds` of a step by phase are empty unless they come from a measurement."""

    path: str  # of the configuration
    fit: Fit
    model_source: str  # of the model's shape
    cluster_source: str
    changes: Sequence[Suggestion]
    seconds: dict[str, float]
    lengths: LengthAssumption  # that the times assume
    not_counted: list[str]  # reward models and a reference of unknown shape
    offloads: list[Offload]
    longest: list[LongestSequences]  # that fit; empty without GPUs

    @property
    def fits(self) -> bool:
        return self.fit.fits and not self.not_counted


def print_plan(p: PlanResult, console: Console) -> None:
    f = p.fit
    print_line(console, f"{f.model.name}: {f.model.parameters:,} parameters, from {p.model_source}")
    print_line(console, f"{describe_cluster(f.nodes)}: {p.cluster_source}\n")
    print_heading(console, "Where")
    drawing.draw_nodes(f, console)
    print_heading(console, "\nBatch")
    limited = replace(f.config, rollout=replace(f.config.rollout, max_prompt_tokens=f.lengths.prompt))
    console.print(batch_table(limited))
    print_memory(f, console)
    print_offloads(p, console)
    print_longest(p, console)
    print_disk(f, console)
    print_times(p, console)
    print_verdict(p, console)


def print_heading(console: Console, text: str) -> None:
    print_line(console, text, "bold")


def describe_cluster(nodes: Sequence[NodeSpec]) -> str:
    gpus = sum(n.gpus for n in nodes)
    kinds = list(dict.fromkeys(n.gpu.name for n in nodes if n.gpu))
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    return f"{gpus} x {', '.join(kinds)} in {count}" if gpus else count


def print_memory(f: Fit, console: Console) -> None:
    """A column for each kind of process, at the moment when it needs most; then the fullest GPU and node."""
    on_gpu = f.config.cluster.device == "gpu"
    columns: list[tuple[str, str, Parts]] = []  # process, moment, parts
    for name, p in f.processes.items():
        if p.device or not on_gpu:
            moment, parts = p.peak(on_device=bool(p.device))
            columns.append((name, moment if len(p.device or p.host) > 1 else "always", parts))
    in_mib = max(total_bytes(parts) for _, _, parts in columns) < 2 * GIB
    place, unit = "a GPU" if on_gpu else "a process", "MiB" if in_mib else "GiB"
    print_heading(console, f"\nMemory of {place}, {unit}, at the moment when it needs most")

    def cell(size: float) -> str:
        if not size:
            return "–"
        size /= (1 << 20) if in_mib else GIB
        return f"{size:.2f}" if abs(size) < 10 else f"{size:,.1f}"

    others = "policy-1" if f.config.policy.ranks == 2 else "policy-1…"  # rank 0 has a column of its own
    table = make_table("part", *(name if name != "policy" else others for name, _, _ in columns))
    table.add_row("at", *(moment for _, moment, _ in columns), style="dim")
    for part in PARTS:
        if any(parts.get(part) for _, _, parts in columns):
            table.add_row(part, *(cell(parts.get(part, 0.0)) for _, _, parts in columns))
    table.add_row("together", *(cell(total_bytes(parts)) for _, _, parts in columns), style="bold")
    console.print(table)
    print_fullest(f, console)


def print_fullest(f: Fit, console: Console) -> None:
    if f.tightest and f.config.cluster.device == "gpu":
        g = f.tightest
        left = g.capacity - g.needed
        rest = (
            f"{format_gib(left)} GiB ({left / g.capacity:.0%}) left"
            if left >= 0
            else f"{format_gib(-left)} GiB too much"
        )
        use = f"{format_gib(g.needed)} of {format_gib(g.capacity)} GiB at {g.moment}"
        print_line(console, f"fullest: {', '.join(g.workers)}: {use}, {rest}")
    if has_engines(f.config):
        print_cache(f, console)
    node = max(range(len(f.host_bytes)), key=lambda i: f.host_bytes[i])
    capacity = f" of {format_gib(f.nodes[node].memory)}" if f.nodes[node].memory else ""
    use = f"{format_gib(f.host_bytes[node])} GiB{capacity} at most, every process counted whole"
    print_line(console, f"main memory of node {node}: {use}", "dim")


def print_cache(f: Fit, console: Console) -> None:
    longest = f.lengths.longest
    gpu_bytes = min((g.capacity for g in f.gpus), default=0.0)
    room = kv_cache_tokens(f.config, f.model, gpu_bytes, longest)
    sequences = f"{room / longest:,.1f} full sequences of {longest:,}"
    print_line(console, f"KV cache of an engine: {room:,.0f} tokens, {sequences}", "dim")
    asked, most = f.config.rollout.max_sequences, most_sequences(f.config, f.model, gpu_bytes)
    if most < asked:
        print_line(
            console, f"an engine decodes {most} sequences at once, not {asked}: it has no states for more", "yellow"
        )


def print_offloads(p: PlanResult, console: Console) -> None:
    """A line for each option that offloads something, or one that says that none does."""
    if not p.fit.gpus:
        return
    recompute = "on" if p.fit.config.policy.gradient_checkpointing else "off"
    print_line(console, f"gradient checkpointing: {recompute}", "dim")
    if not p.offloads:
        print_line(console, "offloaded to main memory: nothing", "dim")
    for offload in p.offloads:
        g = offload.fullest
        use = f"without it a GPU would hold {format_gib(g.needed)} of {format_gib(g.capacity)} GiB"
        verdict, style = ("needed", "dim") if offload.is_needed else ("NOT NEEDED", "yellow")
        print_line(console, f"offloaded to main memory by {offload.option}, {verdict}: {use}", style)


def print_longest(p: PlanResult, console: Console) -> None:
    if not p.longest:
        return
    print_heading(console, "\nLongest sequence that fits, in tokens, with policy.tokens_per_pack as long")
    table = make_table("sequence_parallel", *MEMORY)
    for sharing, tokens in p.longest:
        table.add_row(str(sharing), *(f"{n:,}" if n else "–" for n in tokens.values()))
    console.print(table)


def print_disk(f: Fit, console: Console) -> None:
    d = f.disk
    print_heading(console, "\nDisk")
    critic = f", critic {format_size(d.critic)}" if d.critic else ""
    critic += f", reference {format_size(d.reference)}" if d.reference else ""
    parts = f"weights {format_size(d.weights)}, optimizer {format_size(d.optimizer)}{critic}"
    print_line(console, f"a checkpoint: {format_size(d.checkpoint)}: {parts}")
    keep = f.config.checkpoint.keep_last
    print_line(console, f"the run: {format_size(d.run)}, {d.checkpoints} at a time with checkpoint.keep_last {keep}")


def print_times(p: PlanResult, console: Console) -> None:
    f, phases = p.fit, dict(p.seconds)
    if f.config.cluster.device == "gpu" and not any(node.gpus for node in f.nodes):
        return  # there is nothing to estimate without a GPU
    if phases:
        print_heading(console, "\nSeconds of a step, with the costs that were measured")
        step = phases.pop("step")
    else:
        print_heading(console, "\nSeconds of a step: an ESTIMATE that may be off by a factor of two or more")
        phases, step = f.times.phases, f.times.step
    print_line(console, p.lengths.description, "dim")
    table = make_table("phase", "s", "share")
    for phase, seconds in phases.items():
        table.add_row(phase, f"{seconds:,.3g}", f"{seconds / step:.0%}" if step else "–")
    name = "step, rollout beside the rest" if f.times.overlapped and not p.seconds else "step"
    table.add_row(name, f"{step:,.3g}", "", style="bold")
    console.print(table)
    steps = f.config.trainer.steps
    duration = format_duration(step * steps)
    print_line(console, f"{steps:,} steps: about {duration}, evaluations and checkpoints left out", "dim")


def print_verdict(p: PlanResult, console: Console) -> None:
    f = p.fit
    console.print()
    for reason in p.not_counted:
        print_line(console, f"Not counted: {reason}", "yellow")
    if not f.fits:
        print_problems(p, console)
    elif p.not_counted:
        print_line(console, f"Whether {p.path} fits is not known; all that is counted does.", "yellow")
    elif (g := f.tightest) and g.needed > (1 - TIGHT) * g.capacity:
        tightly = f"✓ {p.path} fits, but tightly: less than {TIGHT:.0%} of GPU {g.index} is left."
        print_line(console, tightly, "yellow")
    else:
        print_line(console, f"✓ {p.path} fits.", "green")


def print_problems(p: PlanResult, console: Console) -> None:
    print_line(console, f"✗ {p.path} does not fit:", "red")
    for problem in p.fit.problems:
        print_line(console, f"  {problem}")
    if not p.changes:
        print_line(console, "No suggestion fits this cluster: it needs more or larger GPUs, or a smaller model.")
        return
    helps = p.changes[0].fit.fits
    print_line(
        console, "Any of these changes makes it fit:" if helps else "No suggestion makes it fit. The nearest is:"
    )
    for i, change in enumerate(p.changes, 1):
        time = f"{change.slower - 1:+.0%} time of a step" if abs(change.slower - 1) >= 0.005 else "no slower"
        over = "" if helps else f", still {format_gib(change.fit.bytes_over)} GiB too much"
        print_line(console, f"  {i}. {change.text}  ({time}, estimated{over})")


def to_json(p: PlanResult) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    f = p.fit
    return {
        "model": asdict(f.model) | {"parameters": f.model.parameters, "from": p.model_source},
        "lengths": asdict(f.lengths),
        "cluster": {"from": p.cluster_source, "nodes": [asdict(n) for n in f.nodes]},
        "placed": f.layout.gpus,
        "cpu_workers": f.layout.cpu_workers,
        "unplaced": [asdict(bundle) for bundle in f.layout.unplaced],
        "batch": {quantity: number for quantity, _, number in batch_rows(f.config)},
        "memory": {
            name: {"count": p.count, "device": p.device, "host": p.host, "gpus": p.gpus}
            for name, p in f.processes.items()
        },
        "gpus": [
            {"node": g.node, "gpu": g.index, "workers": g.workers, "moment": g.moment, "parts": g.parts}
            | {"needed": g.needed, "capacity": g.capacity}
            for g in f.gpus
        ],
        "host": f.host_bytes,
        "gradient_checkpointing": f.config.policy.gradient_checkpointing,
        "offloads": [
            {"option": o.option, "needed": o.is_needed, "bytes_without": o.fullest.needed} for o in p.offloads
        ],
        "longest_sequences": {str(row.sharing): row.tokens for row in p.longest},
        "disk": asdict(f.disk) | {"checkpoint": f.disk.checkpoint, "run": f.disk.run},
        "seconds": f.times.phases | {"step": f.times.step},
        "measured_seconds": p.seconds,
        "lengths_of_seconds": asdict(p.lengths),
        "fits": p.fits,
        "not_counted": p.not_counted,
        "problems": f.problems,
        "changes": [
            {"set": s.settings, "fits": s.fit.fits, "slower": s.slower, "bytes_over": s.fit.bytes_over}
            for s in p.changes
        ],
    }
