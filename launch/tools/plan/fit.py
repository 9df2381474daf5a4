"""Whether a configuration fits a cluster: its processes on nodes and GPUs, what each holds, and by how much that is too much."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launch.bundles import Bundle, make_bundles
from launch.bundles import describe_total as all_together
from launch.placement import choose_transport
from launch.tools.plan.layout import Layout, UnplacedBundle, deal_to_nodes, place_bundles, worker_names
from rlsys.config.schema import Config, ConfigError
from rlsys.estimates.devices import GIB, Gpu, NodeSpec
from rlsys.estimates.disk import DiskSpace, disk_space
from rlsys.estimates.engine import engine_parts, kv_cache_tokens
from rlsys.estimates.memory import Parts, ProcessMemory, SequenceLengths, add_parts, total_bytes
from rlsys.estimates.processes import memory_by_role
from rlsys.estimates.step_time import StepTimes, estimate_step
from rlsys.models.shapes import ModelShape, tensor_parallel_problem

TIGHT = 0.05  # of a device that should be free: what is not counted, and memory in pieces, takes some


@dataclass(frozen=True)
class GpuUse:
    """A GPU, who is on it, and the moment when they need most of it."""

    node: int
    index: int
    gpu: Gpu
    workers: list[str]
    moment: str = ""
    parts: Parts = field(default_factory=dict)

    @property
    def needed(self) -> float:
        return total_bytes(self.parts)

    @property
    def capacity(self) -> float:
        return self.gpu.memory_gib * GIB


@dataclass(frozen=True)
class Fit:
    """What became of it, and what is wrong with it. `over` is how many bytes are too many, all together; 0: it fits."""

    config: Config
    model: ModelShape
    lengths: SequenceLengths
    nodes: Sequence[NodeSpec]
    bundles: list[Bundle]
    layout: Layout
    processes: dict[str, ProcessMemory]
    gpus: list[GpuUse]
    host_bytes: list[float]  # bytes that each node's processes hold at most
    disk: DiskSpace
    times: StepTimes
    problems: list[str]
    bytes_over: float

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def tightest(self) -> GpuUse | None:
        return max(self.gpus, key=lambda g: g.needed / g.capacity, default=None)


def check_fit(
    c: Config,
    model: ModelShape,
    lengths: SequenceLengths,
    new: float,
    nodes: Sequence[NodeSpec],
    scorers: Mapping[str, ModelShape] | None = None,
) -> Fit:
    """`new`: tokens of a completion on average, for the times; `scorers`: reward models by their paths."""
    wanted = make_bundles(c, training=True)
    on_gpus = [n for n in nodes if n.gpu and n.gpus]
    gpu = min((n.gpu for n in on_gpus if n.gpu), key=lambda g: g.memory_gib, default=None)
    problems: list[str] = []
    over = 0.0
    travels = c
    try:
        travels = replace(c, sync=replace(c.sync, transport=choose_transport(c, len(nodes))))
    except ConfigError as error:
        problems.append(str(error))
        over += 1
    if problem := tensor_parallel_problem(model, c.rollout.tensor_parallel):
        problems.append(problem)
        over += 1
    every = memory_by_role(travels, model, lengths, gpu.memory_gib * GIB if gpu else 0.0, scorers)
    placed = place_bundles(wanted, [n.gpus for n in nodes], [n.cpus for n in nodes])
    reserved = {name for bundle in wanted for name in bundle.workers}
    placed.cpu_workers = deal_to_nodes(
        [name for name in worker_names(c) if name not in reserved], [n.takes_cpu_workers for n in nodes]
    )
    placed.cpu_workers[0].append("driver")
    gpus = [
        _on_gpu(every, placed, n, i, nodes[n].gpu) for n, there in enumerate(placed.gpus) for i in range(len(there))
    ]
    found = [g for g in gpus if g]
    if placed.missing and sum(b.gpus for b in wanted) > (have := sum(n.gpus for n in nodes)):
        problems.append(f"{all_together(wanted)}. The cluster has {have}.")
    for missing in _alike(placed.missing):
        first, last = missing[0], missing[-1]
        each = " each" * (len(missing) > 1)
        what = f"{first.gpus:g} GPU{'s' * (first.gpus != 1)}" + " and a CPU" * first.for_cpus
        problems.append(f"{' to '.join(dict.fromkeys((first.workers, last.workers)))}: no node has {what}{each} left.")
        over += sum(m.gpus for m in missing) * (gpu.memory_gib if gpu else 80) * GIB
    worst = max(found, key=lambda g: g.needed - g.capacity, default=None)
    crowded = [g for g in found if g.needed > g.capacity]
    if worst and crowded:
        more = f", and {len(crowded) - 1} other GPUs" * (len(crowded) > 1)
        problems.append(
            f"GPU {worst.index} of node {worst.node} ({', '.join(worst.workers)}){more}: {format_gib(worst.needed)} GiB at {worst.moment}, "
            f"{format_gib(worst.needed - worst.capacity)} too much."
        )
        over += sum(g.needed - g.capacity for g in crowded)
    over += _engine_problem(c, model, lengths, gpu if c.cluster.device == "gpu" else None, problems)
    host = [_on_host(travels, every, placed, n) for n in range(len(nodes))]
    for n, (node, need) in enumerate(zip(nodes, host, strict=True)):
        if node.memory and need > node.memory:
            problems.append(
                f"node {n}: its processes hold {format_gib(need)} GiB of main memory at most, {format_gib(need - node.memory)} more than it has."
            )
            over += need - node.memory
    times = estimate_step(travels, model, lengths, gpu if c.cluster.device == "gpu" else None, new)
    return Fit(
        c, model, lengths, nodes, wanted, placed, every, found, host, disk_space(c, model), times, problems, over
    )


def format_size(found: float) -> str:
    return f"{format_gib(found)} GiB" if found >= GIB else f"{found / 2**20:.1f} MiB"


def _alike(missing: list[UnplacedBundle]) -> list[list[UnplacedBundle]]:
    """Those of one kind together."""
    found: dict[tuple[str, float, bool], list[UnplacedBundle]] = {}
    for m in missing:
        found.setdefault((re.sub(r"\d+", "", m.workers), m.gpus, m.for_cpus), []).append(m)
    return list(found.values())


def shorten_names(names: Sequence[str]) -> list[str]:
    """["rollout-8", "rollout-9", "policy-0"] -> ["rollout-8 to 9", "policy-0"]"""
    runs: list[list[str]] = []
    for name in names:
        if run := next((run for run in runs if _follows(name, run[-1])), None):
            run.append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('-')[2]}" for run in runs]


def _follows(name: str, other: str) -> bool:
    stem, _, number = other.rpartition("-")
    return bool(stem) and name == f"{stem}-{int(number) + 1}"


def format_gib(size: float) -> str:
    return f"{size / GIB:.1f}" if abs(size) < 100 * GIB else f"{size / GIB:,.0f}"


def find_process(every: dict[str, ProcessMemory], member: str) -> ProcessMemory | None:
    """The process by its worker's name; ranks but the first are alike."""
    return every.get(member) or every.get(re.sub(r"-[\d-]+$", "", member))


def _on_gpu(every: dict[str, ProcessMemory], placed: Layout, node: int, index: int, gpu: Gpu | None) -> GpuUse | None:
    if gpu is None:
        return None
    members = placed.gpus[node][index]
    there = [p for m in members if (p := find_process(every, m)) and p.device]
    moments = {name for p in there for name in p.device}
    at = {name: add_parts(*(p.device.get(name) or p.device["generate"] for p in there)) for name in moments}
    moment, parts = max(at.items(), key=lambda m: total_bytes(m[1]), default=("", {}))
    return GpuUse(node, index, gpu, members, moment, parts)


def _engine_problem(
    c: Config, model: ModelShape, lengths: SequenceLengths, gpu: Gpu | None, problems: list[str]
) -> float:
    """An engine that has no room for one whole sequence does not start."""
    room = kv_cache_tokens(c, model, gpu.memory_gib * GIB if gpu else 0.0)
    longest = lengths.prompt + lengths.completion
    if room >= longest:
        return 0.0
    problems.append(
        f"rollout: an engine has room for the keys and values of {max(room, 0):,.0f} tokens; one full sequence has {longest:,}."
    )
    width = 4 if c.rollout.dtype == "float32" else 2
    cache = engine_parts(c, model, gpu.memory_gib * GIB)["KV cache"] if gpu else room * model.kv_bytes_per_token(width)
    return c.rollout.engines * max(longest * model.kv_bytes_per_token(width) - cache, 1.0)


def _on_host(c: Config, every: dict[str, ProcessMemory], placed: Layout, node: int) -> float:
    """All processes at their most. Weights that a rank shares with the engines of its host are there once."""
    names = dict.fromkeys([*(m for gpu in placed.gpus[node] for m in gpu), *placed.cpu_workers[node]])
    found = sum(total_bytes(p.peak()[1]) for m in names if (p := find_process(every, m)))
    if c.sync.transport != "shared_memory":
        return found
    engines = sum(name.startswith("rollout") for name in names)
    return found - engines * every["rollout"].host.get("sync", {}).get("buckets", 0.0)
