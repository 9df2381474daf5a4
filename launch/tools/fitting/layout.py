"""On which nodes and GPUs the workers of a run would run. Pure arithmetic, for `plan`.

Bundles are packed as Ray packs them. Workers without GPUs go to nodes as in `placement`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from launch.bundles import Bundle
from launch.roles import worker_names
from launch.tools.estimates.devices import NodeSpec
from rlsys.config.schema import Config


@dataclass(frozen=True)
class UnplacedBundle:
    """A bundle that fits on no node. `UnplacedBundle("rollout-4 + policy-4", gpus=1)`"""

    workers: str
    gpus: float
    for_cpus: bool = False  # a node has these GPUs free, but no CPU


@dataclass
class ClusterLayout:
    """`gpus[node][gpu]` lists the workers there. An engine of several GPUs is on each of them."""

    gpus: list[list[list[str]]]
    unplaced: list[UnplacedBundle] = field(default_factory=list)
    cpu_workers: list[list[str]] = field(default_factory=list)  # by node: workers without GPUs; the driver on the first

    def all_gpus(self) -> Iterator[tuple[int, int]]:
        return ((node, index) for node, gpus in enumerate(self.gpus) for index in range(len(gpus)))

    def workers_of(self, node: int) -> list[str]:
        """Returns all workers of a node, each once."""
        return list(dict.fromkeys([*(name for gpu in self.gpus[node] for name in gpu), *self.cpu_workers[node]]))


def lay_out(c: Config, bundles: Sequence[Bundle], nodes: Sequence[NodeSpec]) -> ClusterLayout:
    layout = place_bundles(bundles, [n.gpus for n in nodes], [n.cpus for n in nodes])
    with_gpus = {name for bundle in bundles for name in bundle.workers}
    others = [name for name in worker_names(c) if name not in with_gpus]
    layout.cpu_workers = deal_to_nodes(others, [n.takes_cpu_workers for n in nodes])
    layout.cpu_workers[0].append("driver")
    return layout


def place_bundles(bundles: Sequence[Bundle], gpus: Sequence[int], cpus: Sequence[float | None] = ()) -> ClusterLayout:
    """Packs bundles onto few nodes, the largest first. Bundles that need a part of a GPU share one.

    `gpus` and `cpus` are what is free on each node. A number of CPUs that is not known (None) is taken to be enough.
    """
    free_gpus = list(gpus)
    free_cpus = [math.inf if n is None else n for n in cpus] or [math.inf] * len(gpus)
    layout = ClusterLayout([[[] for _ in range(n)] for n in gpus])
    shared: dict[tuple[int, int], float] = {}  # free part of each GPU that is shared, by node and index
    for bundle in sorted(bundles, key=lambda b: -b.gpus):
        part = next((at for at, left in shared.items() if bundle.gpus <= left and free_cpus[at[0]] >= 1), None)
        if bundle.gpus < 1 and part:
            node, index = part
            layout.gpus[node][index] += list(bundle.workers)
            shared[part] -= bundle.gpus
            free_cpus[node] -= 1
            continue
        count = math.ceil(bundle.gpus)
        with_gpus = [node for node in range(len(gpus)) if count <= free_gpus[node]]
        candidates = [node for node in with_gpus if free_cpus[node] >= 1]
        if not candidates:
            layout.unplaced.append(UnplacedBundle(" + ".join(bundle.workers), bundle.gpus, bool(with_gpus)))
            continue
        node = min(candidates, key=lambda node: free_gpus[node] == gpus[node])  # nodes in use go first
        first = gpus[node] - free_gpus[node]
        for gpu in range(count):
            layout.gpus[node][first + gpu] += [name for name, its_gpus in bundle.workers.items() if gpu in its_gpus]
        if bundle.gpus < 1:
            shared[node, first] = 1 - bundle.gpus
        free_gpus[node] -= count
        free_cpus[node] -= 1
    return layout


def deal_to_nodes(names: Sequence[str], takes_workers: Sequence[bool]) -> list[list[str]]:
    """Deals workers to the nodes that take some, in turn; to all nodes if none takes any."""
    dealt: list[list[str]] = [[] for _ in takes_workers]
    receivers = [node for node, takes in zip(dealt, takes_workers, strict=True) if takes] or dealt
    for turn, name in enumerate(names):
        receivers[turn % len(receivers)].append(name)
    return dealt
