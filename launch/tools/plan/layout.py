"""On which nodes and GPUs a run's workers would come to lie: bundles as Ray packs them, the others dealt out as `placement` does.
Pure arithmetic, for `plan`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.bundles import Bundle
from rlsys.config.schema import Config
from rlsys.rewards.settings import reward_services, worker_name


@dataclass(frozen=True)
class UnplacedBundle:
    """A bundle that no node has room for. `Missing("rollout-4 + policy-4", gpus=1)`"""

    workers: str
    gpus: float
    for_cpus: bool = False  # there is a node with these GPUs, but not with a CPU besides


@dataclass
class Layout:
    """`gpus[node][gpu]` are the workers there; an engine of several GPUs is on each of them."""

    gpus: list[list[list[str]]]
    missing: list[UnplacedBundle] = field(default_factory=list)
    cpu_workers: list[list[str]] = field(
        default_factory=list
    )  # by node: workers without GPUs, and on the first the driver


def place_bundles(bundles: Sequence[Bundle], free: Sequence[int], cpus: Sequence[float | None] = ()) -> Layout:
    """On as few nodes as possible, the largest bundles first, a bundle on one node; shares of a GPU share one.

    `free` are the nodes' GPUs, `cpus` their CPUs; None: not known, and taken to be enough.
    """
    room, cores = list(free), [math.inf if n is None else n for n in cpus] or [math.inf] * len(free)
    laid = Layout([[[] for _ in range(n)] for n in free])
    shared: dict[tuple[int, int], float] = {}  # node and GPU: what is left of it
    for bundle in sorted(bundles, key=lambda b: -b.gpus):
        members, need = list(bundle.workers), bundle.gpus
        part = (
            next((at for at, left in shared.items() if need <= left and cores[at[0]] >= 1), None) if need < 1 else None
        )
        if part:
            laid.gpus[part[0]][part[1]] += members
            shared[part] -= need
            cores[part[0]] -= 1
            continue
        whole = math.ceil(need)
        with_gpus = [node for node in range(len(room)) if whole <= room[node]]
        candidates = [node for node in with_gpus if cores[node] >= 1]
        if not candidates:
            laid.missing.append(UnplacedBundle(" + ".join(members), need, bool(with_gpus)))
            continue
        node = min(candidates, key=lambda node: room[node] == free[node])  # nodes that are used go first
        first = free[node] - room[node]
        for gpu in range(whole):
            laid.gpus[node][first + gpu] += [name for name, its in bundle.workers.items() if gpu in its]
        if need < 1:
            shared[node, first] = 1 - need
        room[node] -= whole
        cores[node] -= 1
    return laid


def deal_to_nodes(names: Sequence[str], nodes: Sequence[bool]) -> list[list[str]]:
    """To the nodes in turn; to those that are kept free of workers where there are no others."""
    found: list[list[str]] = [[] for _ in nodes]
    to = [there for there, dealt in zip(found, nodes, strict=True) if dealt] or found
    for turn, name in enumerate(names):
        to[turn % len(to)].append(name)
    return found


def worker_names(c: Config) -> list[str]:
    """In the order in which launch/cluster.py starts them."""
    names = [f"policy-{i}" for i in range(c.policy.ranks)]
    names += ["reference"] * (c.reference.kl_coef > 0)
    names += [f"critic-{i}" for i in range(c.critic.ranks)] * (c.algorithm.advantage == "gae")
    names += [f"rollout-{i}" for i in range(c.rollout.engines)]
    return names + [worker_name(n, i) for n, service in enumerate(reward_services(c)) for i in range(service.workers)]
