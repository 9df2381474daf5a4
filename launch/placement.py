"""Reserves the GPUs of a run with Ray, and explains in words why they cannot be had.

Workers without GPUs are distributed over the nodes in turn. The number of nodes decides how weights are sent.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.bundles import Bundle, describe_total, format_count, make_bundles
from launch.roles import role_of
from rlsys.config.schema import Config
from rlsys.config.transports import TRANSPORTS, fastest_transport
from rlsys.errors import ConfigError

if TYPE_CHECKING:
    from rlsys.runs.progress import Note

# For GPUs that exist but are taken: the workers of a driver that has just ended hold them for a moment.
WAIT_FOR_GPUS_S = 60.0


@dataclass(frozen=True)
class NodeResources:
    """`NodeResources("10.0.0.1", gpus=8, cpus=64, free_gpus=3, free_cpus=60)`"""

    address: str
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float


@dataclass(frozen=True)
class Reservation:
    """Called with the name of a worker, it returns the worker's Ray options."""

    placement_group: Any = None
    bundles: list[Bundle] = field(default_factory=list)
    shared_gpu_ids: dict[int, list[str]] = field(
        default_factory=dict
    )  # CUDA's ids, of each bundle with several workers
    node_ids: list[str] = field(default_factory=list)  # nodes for workers without GPUs
    turn: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, name: str) -> dict[str, Any]:
        number = next((i for i, bundle in enumerate(self.bundles) if name in bundle.workers), None)
        if number is None:
            return self.options_without_gpu()
        bundle, strategy = self.bundles[number], in_bundle(self.placement_group, number)
        if number not in self.shared_gpu_ids:
            return {"num_gpus": bundle.gpus, "scheduling_strategy": strategy}
        visible = ",".join(self.shared_gpu_ids[number][i] for i in bundle.workers[name])
        return {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": visible}}, "scheduling_strategy": strategy}

    def options_without_gpu(self) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not self.node_ids:
            return {}
        node = self.node_ids[next(self.turn) % len(self.node_ids)]
        # Ray places an actor that needs no resources at random, with any strategy. So each asks for one byte.
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True), "memory": 1}


def in_bundle(placement_group: Any, number: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=number)


def reserve_gpus(ray: Any, config: Config, training: bool, note: "Note") -> Reservation:
    """Reserves the GPUs of a run. Raises `ConfigError` if the cluster is too small, or if others hold them too long."""
    bundles = make_bundles(config, training)
    if not bundles:
        return Reservation(node_ids=worker_node_ids(ray))
    deadline, noted = time.monotonic() + min(WAIT_FOR_GPUS_S, config.cluster.start_timeout_s), False
    while True:
        nodes = list_nodes(ray)
        if unplaced := first_unplaceable(bundles, nodes, free=False):
            raise ConfigError(explain_too_small(config, bundles, unplaced, nodes))
        unplaced = first_unplaceable(bundles, nodes, free=True)
        if unplaced is None:
            if group := create_placement_group(ray, bundles, max(deadline - time.monotonic(), 10)):
                return Reservation(group, bundles, ask_shared_gpu_ids(ray, group, bundles), worker_node_ids(ray))
            unplaced = bundles[0]  # another run was faster
        if time.monotonic() > deadline:
            raise ConfigError(explain_taken(bundles, unplaced, nodes))
        if not noted:
            note(f"waiting for GPUs that others have. {describe_nodes(nodes)}")
            noted = True
        time.sleep(1)


def create_placement_group(ray: Any, bundles: list[Bundle], timeout_s: float) -> Any | None:
    """Returns None if the resources are not available in time."""
    group = ray.util.placement_group([bundle.resources for bundle in bundles], strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if ready:
        return group
    ray.util.remove_placement_group(group)
    return None


def ask_shared_gpu_ids(ray: Any, group: Any, bundles: list[Bundle]) -> dict[int, list[str]]:
    """CUDA's ids of the GPUs in each bundle that several workers share.

    Ray cannot give two GPUs to one worker and each of them to another worker too. So a task that holds all GPUs of the
    bundle asks for their ids, and the workers get CUDA_VISIBLE_DEVICES instead of GPUs.
    """
    ids = {}
    for i, bundle in enumerate(bundles):
        if len(bundle.workers) > 1:
            options = {"num_cpus": 0, "num_gpus": bundle.gpus, "scheduling_strategy": in_bundle(group, i)}
            ids[i] = ray.remote(assigned_gpu_ids).options(**options).remote()
    return dict(zip(ids, ray.get(list(ids.values())), strict=True))


def assigned_gpu_ids() -> list[str]:
    """Runs as a Ray task."""
    import ray

    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ids


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
    """Ids of the nodes for workers without GPUs. A node that offers no CPU, such as a head, gets none of them."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node["NodeID"] for node in nodes if node["Resources"].get("CPU")] or [node["NodeID"] for node in nodes]


def choose_transport(config: Config, nodes: int) -> str:
    """`auto`: within a GPU, between GPUs, within a host, or between hosts."""
    name = config.sync.transport
    if name == "auto":
        return fastest_transport(config.cluster.device, config.cluster.placement, nodes)
    if TRANSPORTS[name].one_host and nodes > 1:
        raise ConfigError(
            f"sync.transport {name} keeps within a host, and the cluster has {nodes} nodes. Use auto, or object_store."
        )
    return name


def first_unplaceable(bundles: Iterable[Bundle], nodes: list[NodeResources], free: bool) -> Bundle | None:
    """The first bundle that fits on no node. The largest bundles go first, each to the node with the least room left.

    `free` counts only what other runs leave free.
    """
    room = [[n.free_gpus, n.free_cpus] if free else [n.gpus, n.cpus] for n in nodes]
    for bundle in sorted(bundles, key=lambda b: -b.gpus):
        fitting = [r for r in room if r[0] >= bundle.gpus and r[1] >= 1]
        if not fitting:
            return bundle
        tightest = min(fitting, key=lambda r: r[0])
        tightest[0] -= bundle.gpus
        tightest[1] -= 1
    return None


def explain_too_small(config: Config, bundles: list[Bundle], unplaced: Bundle, nodes: list[NodeResources]) -> str:
    largest, role = max((n.gpus for n in nodes), default=0), role_of(next(iter(unplaced.workers)))
    if not largest:
        hint = f"Start nodes with GPUs, or {role.without_gpus}."
    elif unplaced.gpus > largest:
        hint = role.too_large.format(largest=largest)
    elif config.cluster.device == "gpu" and config.cluster.placement == "separate":
        hint = "Use fewer, or cluster.placement=colocated, where engines and policy share GPUs."
    else:
        hint = "Use fewer."
    return f"{unplaced}, and finds no place. {describe_total(bundles)}. {describe_nodes(nodes, free=False)}. {hint}"


def explain_taken(bundles: list[Bundle], unplaced: Bundle, nodes: list[NodeResources]) -> str:
    return (
        f"{unplaced}, and others keep them. {describe_total(bundles)}. {describe_nodes(nodes)}. `ray status` and "
        "`rlsys job list` show which jobs run; wait, or use fewer."
    )


def describe_nodes(nodes: list[NodeResources], free: bool = True) -> str:
    """`The cluster has 2 nodes: 10.0.0.1 with 4 GPUs and 64 CPUs, 3 and 60 of them free; 10.0.0.2 with …`"""
    alike: dict[tuple[float, ...], list[str]] = {}
    for n in nodes:
        left = (n.free_gpus, n.free_cpus) if free else (n.gpus, n.cpus)
        alike.setdefault((n.gpus, n.cpus, *left), []).append(n.address)
    parts = []
    for (gpus, cpus, free_gpus, free_cpus), addresses in alike.items():
        names = ", ".join(addresses) if len(addresses) <= 3 else f"{len(addresses)} nodes"
        resources = f"{format_count(gpus, 'GPU')} and {format_count(cpus, 'CPU')}"
        each = " each" if len(addresses) > 1 else ""
        all_free = (gpus, cpus) == (free_gpus, free_cpus)
        rest = ", all free" if all_free else f", {free_gpus:g} and {free_cpus:g} of them free"
        parts.append(f"{names} with {resources}{each}{rest if free else ''}")
    total = "" if len(alike) == 1 and len(nodes) > 3 else f"{format_count(len(nodes), 'node')}: "
    return f"The cluster has {total}{'; '.join(parts)}"
