"""Where the ranks of a model meet: one address, never all of the host's.

rank 0 ──listens on address:port──▶ the others connect      what torch calls a store
every rank listens for its neighbours on the interface of its own node's address
"""

import os
import socket
from datetime import timedelta
from typing import Any

import psutil


def create_store(address: str, port: int, rank: int, ranks: int, patience: timedelta) -> Any:
    """The store through which the ranks find each other. torch by itself would listen on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if rank:
        return TCPStore(address, port, ranks, is_master=False, timeout=patience)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family).detach()
    return TCPStore(address, port, ranks, is_master=True, timeout=patience, master_listen_fd=listening)


def bind_gloo(address: str) -> None:
    """Gloo listens where this address is, unless the environment says otherwise; by itself, where the host's name leads."""
    if name := interface_name(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_name(address: str) -> str | None:
    """The network interface that has an address.  "127.0.0.1" -> "lo" """
    there = psutil.net_if_addrs().items()
    return next((name for name, found in there if any(a.address.partition("%")[0] == address for a in found)), None)
