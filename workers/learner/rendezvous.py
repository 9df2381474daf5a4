"""How the ranks of a model meet: at one address, and never on all of the host's interfaces.

rank 0 ──listens on address:port──▶ the others connect      what torch calls a store
every rank listens for its neighbors on the interface that has its own node's address
"""

import os
import socket
from datetime import timedelta
from typing import Any

import psutil


def join_process_group(device: str, rank: int, ranks: int, address: str, port: int, seed: int) -> None:
    """Joins the other ranks, and seeds torch."""
    import deepspeed
    import ray
    import torch
    from deepspeed.constants import default_pg_timeout

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    bind_gloo(ray.util.get_node_ip_address())
    store = create_store(address, port, rank, ranks, default_pg_timeout)
    backend = "gloo" if device == "cpu" else "nccl"
    gpu = torch.device("cuda", 0) if device == "gpu" and ranks > 1 else None  # as DeepSpeed would pass it
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=default_pg_timeout, device_id=gpu
    )
    deepspeed.init_distributed(dist_backend=backend, verbose=False)  # takes over the process group
    torch.manual_seed(seed)


def create_store(address: str, port: int, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Returns the store through which the ranks find each other. torch itself would listen on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if rank:
        return TCPStore(address, port, ranks, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    descriptor = socket.create_server((address, port), family=family).detach()
    return TCPStore(address, port, ranks, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def bind_gloo(address: str) -> None:
    """Makes Gloo listen on the interface of this address, unless the environment names another one.

    By itself, Gloo listens where the host's name leads.
    """
    if name := interface_name(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_name(address: str) -> str | None:
    """Returns the network interface that has an address.  "127.0.0.1" -> "lo" """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
