"""The transports of weights, and where each can be used. `workers/sync` has both ends of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """`Transport(bytes_per_s=2e9, one_host=True)`"""

    bytes_per_s: float  # of a sync
    needs_gpus: bool = False
    one_host: bool = False  # ranks and engines have to run on the same
    placement: str = ""  # the only cluster.placement with which it works; empty: any
    elsewhere: str = ""  # why not with another one, and what to use


# `auto` is the fastest that the cluster allows.
TRANSPORTS = {
    "shared_memory": Transport(2e9, one_host=True),
    "object_store": Transport(0.5e9),
    "nccl": Transport(
        20e9,
        needs_gpus=True,
        placement="separate",
        elsewhere="cannot connect two processes on one GPU; with cluster.placement colocated use cuda_ipc.",
    ),
    "cuda_ipc": Transport(
        500e9,
        needs_gpus=True,
        placement="colocated",
        elsewhere="passes pointers within one GPU; it needs cluster.placement colocated.",
    ),
}


def fastest_transport(device: str, placement: str, nodes: int) -> str:
    usable = {
        name: t.bytes_per_s
        for name, t in TRANSPORTS.items()
        if device == "gpu" or not t.needs_gpus
        if t.placement in ("", placement)
        if nodes == 1 or not t.one_host
    }
    return max(usable, key=lambda name: usable[name])
