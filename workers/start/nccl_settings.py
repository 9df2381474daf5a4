"""What NCCL is told by the environment, compared before processes meet: with other settings a group fails, or never ends.

each process ──its node and settings──▶ the others      one that has other settings than the first ends the start
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from rlsys.errors import ConfigError
from workers.start.network import interface_name

# Variables that name parts of a node, print, or are set by vLLM in its own processes.
MAY_DIFFER = (
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_CONF_FILE"),
    *("NCCL_TOPO", "NCCL_GRAPH", "NCCL_NO_CACHE"),
)
INTERFACE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class NcclSettings:
    """Of one process. `NcclSettings("10.0.0.4", {"NCCL_P2P_DISABLE": "1"}, "eth0", by_node=True)`"""

    node: str  # its address in Ray
    variables: dict[str, str]  # that all must have in common
    interface: str  # what NCCL_SOCKET_IFNAME says
    by_node: bool  # and whether that takes the interface with the node's address


def nccl_settings(address: str) -> NcclSettings:
    """Those of this process, on the node with this address."""
    everything = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    variables = {name: value for name, value in everything.items() if not name.startswith(MAY_DIFFER)}
    pattern = os.environ.get(INTERFACE, "")
    return NcclSettings(address, variables, pattern, takes_interface(pattern, interface_name(address) or ""))


def takes_interface(pattern: str, name: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME takes an interface: `ib0,eth` by beginnings of names, `=eth0` by whole names,
    and with `^` all others."""
    excludes, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exact, names = pattern.startswith("="), pattern.removeprefix("=").split(",")
    return any(name == n if exact else name.startswith(n) for n in names) != excludes


def require_same_settings(first: NcclSettings, other: NcclSettings, names: tuple[str, str]) -> None:
    """Raises `ConfigError` if NCCL is set differently in two processes. `names`: who they are."""
    a, b = first.variables, other.variables
    differ = [
        f"{name} {a.get(name, 'not set')} and {b.get(name, 'not set')}"
        for name in sorted(a | b)
        if a.get(name) != b.get(name)
    ]
    if first.by_node != other.by_node:
        differ.append(
            f"{INTERFACE} {first.interface} and {other.interface}, and only one takes the node's address in Ray"
        )
    if differ:
        raise ConfigError(
            f"NCCL has other settings in {names[0]} on {first.node} than in {names[1]} on {other.node}: {'; '.join(differ)}. "
            "Set them alike in the environment of `ray start` on all nodes, or in cluster.env."
        )


def compare_settings(store: Any, rank: int, ranks: int, own: NcclSettings) -> None:
    """Raises on every rank if one has other settings than rank 0. `store` is torch's, through which ranks find each other."""
    store.set(f"nccl/{rank}", json.dumps(asdict(own)))
    first, *others = [NcclSettings(**json.loads(store.get(f"nccl/{i}"))) for i in range(ranks)]
    for i, other in enumerate(others, start=1):
        require_same_settings(first, other, ("rank 0", f"rank {i}"))
