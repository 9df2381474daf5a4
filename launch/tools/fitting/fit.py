"""Whether a configuration fits a cluster: where its processes run, how much memory they need, and what is too much."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from launch.bundles import Bundle, describe_total, make_bundles
from launch.placement import choose_transport
from launch.tools.estimates.cache import sequence_bytes
from launch.tools.estimates.devices import GIB, Gpu, NodeSpec
from launch.tools.estimates.disk import DiskSpace, disk_space
from launch.tools.estimates.engine import engine_parts, kv_cache_tokens
from launch.tools.estimates.memory import Parts, ProcessMemory, SequenceLengths, add_parts, total_bytes
from launch.tools.estimates.processes import memory_by_role
from launch.tools.estimates.step_time import StepTimes, estimate_step
from launch.tools.fitting.formatting import format_gib
from launch.tools.fitting.layout import ClusterLayout, UnplacedBundle, lay_out
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.shapes import ModelShape, tensor_parallel_problem

TIGHT = 0.05  # share of a device that should stay free, for uncounted memory and fragmentation
ROOMY = 0.1  # share of each GPU that stays free where activations are kept without being asked for


@dataclass(frozen=True)
class GpuUse:
    """A GPU, its workers, and their memory at the moment when they need most."""

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


class Problem(NamedTuple):
    """Something that does not fit, in a sentence, and by how many bytes."""

    text: str
    bytes_over: float


@dataclass(frozen=True)
class Fit:
    """A configuration on a cluster, and what does not fit. `bytes_over` sums all problems; 0: it fits."""

    config: Config
    model: ModelShape
    lengths: SequenceLengths
    nodes: Sequence[NodeSpec]
    bundles: list[Bundle]
    layout: ClusterLayout
    processes: dict[str, ProcessMemory]  # by role
    gpus: list[GpuUse]
    host_bytes: list[float]  # main memory of each node's processes at most
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
    mean_completion: float,
    nodes: Sequence[NodeSpec],
    other_models: Mapping[str, ModelShape] | None = None,
) -> Fit:
    """Estimates whether a run fits. `mean_completion`, in tokens, is for the times. `other_models`: shapes of reward models and reference by path.

    Chooses policy.gradient_checkpointing where it is null.
    """
    if c.policy.gradient_checkpointing is None:
        return choose_checkpointing(
            c, lambda variant: check_fit(variant, model, lengths, mean_completion, nodes, other_models)
        )
    bundles = make_bundles(c, training=True)
    smallest = min((n.gpu for n in nodes if n.gpu and n.gpus), key=lambda g: g.memory_gib, default=None)
    config, problems = with_known_transport(c, len(nodes))
    if problem := tensor_parallel_problem(model, c.rollout.tensor_parallel):
        problems.append(Problem(problem, 1))
    if c.policy.sequence_parallel > 1 and model.mixer:
        problems.append(
            Problem(
                f"policy.sequence_parallel ({c.policy.sequence_parallel}) shares out heads of attention, and "
                f"{model.name} has {model.mixer.name}, which hand on a state from token to token. Use 1.",
                1,
            )
        )
    processes = memory_by_role(config, model, lengths, smallest.memory_gib * GIB if smallest else 0.0, other_models)
    layout = lay_out(c, bundles, nodes)
    gpus = uses_of_gpus(processes, layout, nodes)
    host = [use_of_host(config, processes, layout, n) for n in range(len(nodes))]
    device_gpu = smallest if c.cluster.device == "gpu" else None
    problems += placement_problems(bundles, layout, nodes, smallest)
    problems += gpu_problems(gpus)
    problems += engine_problems(c, model, lengths, device_gpu)
    problems += host_problems(nodes, host)
    return Fit(
        c,
        model,
        lengths,
        nodes,
        bundles,
        layout,
        processes,
        gpus,
        host,
        disk_space(c, model),
        estimate_step(
            config, model, lengths, device_gpu, mean_completion, (other_models or {}).get(c.reference.path, model)
        ),
        [p.text for p in problems],
        sum(p.bytes_over for p in problems),
    )


def choose_checkpointing(c: Config, fit: Callable[[Config], Fit]) -> Fit:
    """Returns the fit without gradient checkpointing, where every GPU then has room to spare or holds no more than with it."""
    keeping, recomputing = (
        replace(c, policy=replace(c.policy, gradient_checkpointing=recompute)) for recompute in (False, True)
    )
    if c.cluster.device == "cpu":
        return fit(keeping)
    kept, recomputed = fit(keeping), fit(recomputing)
    roomy = all(
        one.needed <= max((1 - ROOMY) * one.capacity, other.needed)
        for one, other in zip(kept.gpus, recomputed.gpus, strict=True)
    )
    return kept if roomy and not kept.layout.unplaced and "activations" not in c.policy.offload else recomputed


def with_known_transport(c: Config, nodes: int) -> tuple[Config, list[Problem]]:
    try:
        return replace(c, sync=replace(c.sync, transport=choose_transport(c, nodes))), []
    except ConfigError as error:
        return c, [Problem(str(error), 1)]


def uses_of_gpus(processes: dict[str, ProcessMemory], layout: ClusterLayout, nodes: Sequence[NodeSpec]) -> list[GpuUse]:
    return [use for node, i in layout.all_gpus() if (use := use_of_gpu(processes, layout, node, i, nodes))]


def use_of_gpu(
    processes: dict[str, ProcessMemory], layout: ClusterLayout, node: int, index: int, nodes: Sequence[NodeSpec]
) -> GpuUse | None:
    """Adds up the processes at each moment. A process without that moment counts with its memory while generating."""
    gpu = nodes[node].gpu
    if gpu is None:
        return None
    workers = layout.gpus[node][index]
    on_gpu = [p for worker in workers if (p := find_process(processes, worker)) and p.device]
    moments = dict.fromkeys(moment for p in on_gpu for moment in p.device)  # of equal ones, the first counts
    at = {m: add_parts(*(p.device.get(m) or p.device["generate"] for p in on_gpu)) for m in moments}
    moment, parts = max(at.items(), key=lambda item: total_bytes(item[1]), default=("", {}))
    return GpuUse(node, index, gpu, workers, moment, parts)


def use_of_host(c: Config, processes: dict[str, ProcessMemory], layout: ClusterLayout, node: int) -> float:
    """Adds up all processes at their peaks. Weights that a rank shares with the engines of its host count once."""
    names = layout.workers_of(node)
    peaks = sum(total_bytes(p.peak()[1]) for name in names if (p := find_process(processes, name)))
    if c.sync.transport != "shared_memory":
        return peaks
    engines = sum(name.startswith("rollout") for name in names)
    buckets = processes["rollout"].host.get("sync", {}).get("buckets", 0.0) if engines else 0.0
    return peaks - engines * buckets


def find_process(processes: dict[str, ProcessMemory], worker: str) -> ProcessMemory | None:
    """Returns the process by its worker's name, or else by its role: all ranks but the first are alike."""
    return processes.get(worker) or processes.get(re.sub(r"-[\d-]+$", "", worker))


def placement_problems(
    bundles: list[Bundle], layout: ClusterLayout, nodes: Sequence[NodeSpec], gpu: Gpu | None
) -> Iterator[Problem]:
    available = sum(n.gpus for n in nodes)
    if layout.unplaced and sum(b.gpus for b in bundles) > available:
        yield Problem(f"{describe_total(bundles)}. The cluster has {available}.", 0)
    for group in group_alike(layout.unplaced):
        first, last = group[0], group[-1]
        names = " to ".join(dict.fromkeys((first.workers, last.workers)))
        resources = f"{first.gpus:g} GPU{'s' * (first.gpus != 1)}" + " and a CPU" * first.for_cpus
        each = " each" * (len(group) > 1)
        missing = sum(b.gpus for b in group) * (gpu.memory_gib if gpu else 80) * GIB
        yield Problem(f"{names}: no node has {resources}{each} left.", missing)


def group_alike(unplaced: list[UnplacedBundle]) -> list[list[UnplacedBundle]]:
    """Groups bundles whose workers differ in their numbers only."""
    groups: dict[tuple[str, float, bool], list[UnplacedBundle]] = {}
    for bundle in unplaced:
        kind = re.sub(r"\d+", "", bundle.workers), bundle.gpus, bundle.for_cpus
        groups.setdefault(kind, []).append(bundle)
    return list(groups.values())


def gpu_problems(gpus: list[GpuUse]) -> Iterator[Problem]:
    full = [g for g in gpus if g.needed > g.capacity]
    if not full:
        return
    worst = max(full, key=lambda g: g.needed - g.capacity)
    others = f", and {len(full) - 1} other GPUs" * (len(full) > 1)
    workers, over = ", ".join(worst.workers), format_gib(worst.needed - worst.capacity)
    yield Problem(
        f"GPU {worst.index} of node {worst.node} ({workers}){others}: {format_gib(worst.needed)} GiB at {worst.moment}, "
        f"{over} too much.",
        sum(g.needed - g.capacity for g in full),
    )


def engine_problems(c: Config, model: ModelShape, lengths: SequenceLengths, gpu: Gpu | None) -> Iterator[Problem]:
    """Finds engines without room for one whole sequence, which do not start."""
    room = kv_cache_tokens(c, model, gpu.memory_gib * GIB if gpu else 0.0, lengths.longest)
    longest = lengths.longest
    if room >= longest:
        return
    needed = sequence_bytes(c, model, longest)
    cache = engine_parts(c, model, gpu.memory_gib * GIB)["KV cache"] if gpu else needed * room / longest
    yield Problem(
        f"rollout: an engine has room for the keys and values of {max(room, 0):,.0f} tokens; one full sequence has "
        f"{longest:,}.",
        c.rollout.engines * max(needed - cache, 1.0),
    )


def host_problems(nodes: Sequence[NodeSpec], host_bytes: list[float]) -> Iterator[Problem]:
    for n, (node, needed) in enumerate(zip(nodes, host_bytes, strict=True)):
        if node.memory and needed > node.memory:
            over = needed - node.memory
            yield Problem(
                f"node {n}: its processes hold {format_gib(needed)} GiB of main memory at most, {format_gib(over)} more "
                "than it has.",
                over,
            )
