"""Chooses the network interface for the ranks of a model, and for NCCL between ranks and engines.

By themselves, Gloo listens where the host's name leads, and NCCL on the first interface that it finds. Here both take
the one that has the node's address, at which the others of the cluster reach it.
"""

import os

import psutil


def choose_interface(address: str, *variables: str) -> None:
    """Sets variables such as GLOO_SOCKET_IFNAME, unless the environment sets them, to the interface of this address."""
    if name := interface_name(address):
        for variable in variables:
            os.environ.setdefault(variable, name)


def interface_name(address: str) -> str | None:
    """Returns the network interface that has an address.  "127.0.0.1" -> "lo" """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
