"""How the ranks of a model meet: at one address, and never on all of the host's interfaces.

rank 0 ──listens on address:port──▶ the others connect      what torch calls a store
every rank compares NCCL's settings with those of rank 0, through the store
every rank listens for its neighbors on the interface that has its own node's address
"""

import os
import socket
from datetime import timedelta
from typing import Any

from workers.fleet.ray_cluster import node_address
from workers.start.nccl_settings import compare_settings, nccl_settings
from workers.start.network import choose_interface, print_network


def join_process_group(
    device: str, rank: int, ranks: int, address: str, port: int, *, seed: int, timeout_s: float
) -> None:
    """Joins the other ranks, and seeds torch. `timeout_s`: how long a rank waits for others, at least DeepSpeed's limit."""
    import deepspeed
    import torch

    if device == "gpu":
        require_gpu()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    node = prepare_network(device, ranks)
    timeout = limit_of_waiting(timeout_s)
    store = create_store(address, port, rank, ranks, timeout)
    if device == "gpu" and ranks > 1:
        compare_settings(store, rank, ranks, nccl_settings(node))
    backend = "gloo" if device == "cpu" else "nccl"
    gpu = torch.device("cuda", 0) if device == "gpu" and ranks > 1 else None  # as DeepSpeed would pass it
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=gpu
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)  # takes over the process group
    torch.manual_seed(seed)


def prepare_network(device: str, ranks: int) -> str:
    """Chooses the interface, and returns the node's address. The rank's log says what NCCL will find."""
    address = node_address()
    choose_interface(address, "GLOO_SOCKET_IFNAME", *["NCCL_SOCKET_IFNAME"] * (device == "gpu"))
    if device == "gpu" and ranks > 1:
        print_network(address)
    return address


def limit_of_waiting(timeout_s: float) -> timedelta:
    """Returns how long a rank waits for others: at least DeepSpeed's limit."""
    from deepspeed.constants import default_pg_timeout

    return max(default_pg_timeout, timedelta(seconds=timeout_s))


def require_gpu() -> None:
    """Raises if this process sees no GPU: DeepSpeed would go on without one, and fail later at another place."""
    import torch

    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise RuntimeError(
            f"this rank sees no GPU: torch is built for CUDA {torch.version.cuda}, CUDA_VISIBLE_DEVICES is {visible}. "
            "`rlsys doctor` on this node checks driver and libraries."
        )


def create_store(address: str, port: int, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Returns the store through which the ranks find each other. torch itself would listen on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if rank:
        return TCPStore(address, port, ranks, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    descriptor = socket.create_server((address, port), family=family).detach()
    return TCPStore(address, port, ranks, is_master=True, timeout=timeout, master_listen_fd=descriptor)
