"""Reserves the GPUs of a run with Ray, and says in words what is in the way where they cannot be had. Workers
without GPUs are dealt out to the nodes in turn; by which way weights travel depends on how many there are."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.bundles import Bundle, describe_total, format_count, make_bundles
from rlsys.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from rlsys.runs.progress import Note

# For GPUs that are there and taken: the workers of a driver that has just ended hold them for a moment.
WAIT_FOR_GPUS_S = 60.0


@dataclass(frozen=True)
class NodeResources:
    """Node("10.0.0.1", gpus=8, cpus=64, free_gpus=3, free_cpus=60)"""

    address: str
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float


@dataclass(frozen=True)
class Reservation:
    """Ray options of each worker, by its name."""

    placement_group: Any = None
    bundles: list[Bundle] = field(default_factory=list)
    shared_gpu_ids: dict[int, list[str]] = field(
        default_factory=dict
    )  # what CUDA calls those of each bundle that workers share
    node_ids: list[str] = field(default_factory=list)  # that the others are dealt out to
    turn: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, name: str) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        number = next((i for i, bundle in enumerate(self.bundles) if name in bundle.workers), None)
        if number is None:
            if not self.node_ids:
                return {}
            there = NodeAffinitySchedulingStrategy(self.node_ids[next(self.turn) % len(self.node_ids)], soft=True)
            # Ray throws dice for an actor that asks for nothing, whatever its strategy; this is a byte.
            return {"scheduling_strategy": there, "memory": 1}
        there = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=number)
        bundle = self.bundles[number]
        if number not in self.shared_gpu_ids:
            return {"num_gpus": bundle.gpus, "scheduling_strategy": there}
        visible = ",".join(self.shared_gpu_ids[number][i] for i in bundle.workers[name])
        return {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": visible}}, "scheduling_strategy": there}


def reserve_gpus(ray: Any, config: Config, training: bool, note: "Note") -> Reservation:
    """Reserves the GPUs of a run. Raises `ConfigError` where the cluster does not have them, or others keep them."""
    wanted = make_bundles(config, training)
    if not wanted:
        return Reservation(node_ids=worker_node_ids(ray))
    deadline, told = time.monotonic() + min(WAIT_FOR_GPUS_S, config.cluster.start_timeout_s), False
    while True:
        nodes = list_nodes(ray)
        if stuck := first_unplaceable(wanted, nodes, free=False):
            raise ConfigError(explain_too_small(config, wanted, stuck, nodes))
        stuck = first_unplaceable(wanted, nodes, free=True)
        if stuck is None:
            group = ray.util.placement_group([bundle.resources for bundle in wanted], strategy="PACK")
            ready, _ = ray.wait([group.ready()], timeout=max(deadline - time.monotonic(), 10))
            if ready:
                return Reservation(group, wanted, ask_shared_gpu_ids(ray, group, wanted), worker_node_ids(ray))
            ray.util.remove_placement_group(group)
            stuck = wanted[0]  # somebody was faster
        if time.monotonic() > deadline:
            raise ConfigError(explain_taken(wanted, stuck, nodes))
        if not told:
            note(f"waiting for GPUs that others have. {describe_nodes(nodes)}")
            told = True
        time.sleep(1)


def ask_shared_gpu_ids(ray: Any, group: Any, wanted: list[Bundle]) -> dict[int, list[str]]:
    """What CUDA calls the GPUs of each bundle that workers share. Ray tells it to who has them all, and cannot itself
    give several of them to one worker and each of them to another as well.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    asked = {}
    for i, bundle in enumerate(wanted):
        if len(bundle.workers) > 1:
            there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            task = ray.remote(assigned_gpu_ids).options(num_cpus=0, num_gpus=bundle.gpus, scheduling_strategy=there)
            asked[i] = task.remote()
    return dict(zip(asked, ray.get(list(asked.values())), strict=True))


def assigned_gpu_ids() -> list[str]:
    import ray

    found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return found


def list_nodes(ray: Any) -> list[NodeResources]:
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeResources(
            node["NodeManagerAddress"],
            node["Resources"].get("GPU", 0),
            node["Resources"].get("CPU", 0),
            free.get(node["NodeID"], {}).get("GPU", 0),
            free.get(node["NodeID"], {}).get("CPU", 0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def worker_node_ids(ray: Any) -> list[str]:
    """Ids of nodes that may have any worker; a head can be kept free of work by giving it no CPU."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node["NodeID"] for node in nodes if node["Resources"].get("CPU")] or [node["NodeID"] for node in nodes]


def choose_transport(config: Config, nodes: int) -> str:
    """`auto`: within a GPU, between GPUs, within a host, or between hosts."""
    if config.sync.transport == "shared_memory" and nodes > 1:
        raise ConfigError(
            f"sync.transport shared_memory keeps within a host, and the cluster has {nodes} nodes. Use auto, or object_store."
        )
    if config.sync.transport != "auto":
        return config.sync.transport
    if config.cluster.device == "gpu":
        return "cuda_ipc" if config.cluster.placement == "colocated" else "nccl"
    return "shared_memory" if nodes == 1 else "object_store"


def first_unplaceable(wanted: Iterable[Bundle], nodes: list[NodeResources], free: bool) -> Bundle | None:
    """The first bundle that finds no node, the largest ones first, each on the node that it fills best."""
    room = [[n.free_gpus, n.free_cpus] if free else [n.gpus, n.cpus] for n in nodes]
    for bundle in sorted(wanted, key=lambda b: -b.gpus):
        fitting = [r for r in room if r[0] >= bundle.gpus and r[1] >= 1]
        if not fitting:
            return bundle
        tightest = min(fitting, key=lambda r: r[0])
        tightest[0] -= bundle.gpus
        tightest[1] -= 1
    return None


def explain_too_small(config: Config, wanted: list[Bundle], stuck: Bundle, nodes: list[NodeResources]) -> str:
    largest, role = max((n.gpus for n in nodes), default=0), next(iter(stuck.workers)).partition("-")[0]
    if not largest:
        without = "give the reward model gpus 0, the CPU" if role == "reward" else "use cluster.device=cpu"
        way_out = f"Start nodes with GPUs, or {without}."
    elif stuck.gpus > largest:
        way_out = TOO_LARGE_HINTS[role].format(largest=largest)
    elif config.cluster.device == "gpu" and config.cluster.placement == "separate":
        way_out = "Use fewer, or cluster.placement=colocated, where engines and policy share GPUs."
    else:
        way_out = "Use fewer."
    return f"{stuck}, and finds no place. {describe_total(wanted)}. {describe_nodes(nodes, free=False)}. {way_out}"


TOO_LARGE_HINTS = {
    "rollout": "An engine does not reach over nodes: use rollout.tensor_parallel={largest:g} or less.",
    "reference": "The reference computes on one GPU: use reference.gpus=1 or less.",
    "reward": "A reward model computes on one GPU: give it gpus 1 or less.",
}


def explain_taken(wanted: list[Bundle], stuck: Bundle, nodes: list[NodeResources]) -> str:
    return (
        f"{stuck}, and others keep them. {describe_total(wanted)}. {describe_nodes(nodes)}. `ray status` and "
        "`rlsys job list` show who is at work; wait, or use fewer."
    )


def describe_nodes(nodes: list[NodeResources], free: bool = True) -> str:
    """`The cluster has 2 nodes: 10.0.0.1 with 4 GPUs and 64 CPUs, 3 and 60 of them free; 10.0.0.2 with …`"""
    alike: dict[tuple[float, ...], list[str]] = {}
    for n in nodes:
        left = (n.free_gpus, n.free_cpus) if free else (n.gpus, n.cpus)
        alike.setdefault((n.gpus, n.cpus, *left), []).append(n.address)
    parts = []
    for (gpus, cpus, free_gpus, free_cpus), addresses in alike.items():
        who = ", ".join(addresses) if len(addresses) <= 3 else f"{len(addresses)} nodes"
        what = f"{format_count(gpus, 'GPU')} and {format_count(cpus, 'CPU')}"
        all_free = (gpus, cpus) == (free_gpus, free_cpus)
        rest = ", all free" if all_free else f", {free_gpus:g} and {free_cpus:g} of them free"
        parts.append(f"{who} with {what}{' each' if len(addresses) > 1 else ''}{rest if free else ''}")
    total = "" if len(alike) == 1 and len(nodes) > 3 else f"{format_count(len(nodes), 'node')}: "
    return f"The cluster has {total}{'; '.join(parts)}"
