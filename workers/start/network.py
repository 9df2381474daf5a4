"""Chooses the network interface for the ranks of a model, and for NCCL between ranks and engines.

By themselves, Gloo listens where the host's name leads, and NCCL on the first interface that it finds. Here both take
the one that has the node's address, at which the others of the cluster reach it.
"""

import os

import psutil

# What NCCL reads, then libfabric and NCCL's plugin for it, through which it uses EFA.
PREFIXES = ("NCCL_", "FI_", "OFI_NCCL_")


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


def print_network(address: str) -> None:
    """Prints a line for the process's log: the interface of its node's address, and what is set for NCCL.

    network: 10.0.0.4 is eth0; NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=eth0
    """
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)]
    interface = interface_name(address) or "on no interface"
    print(f"network: {address} is {interface}; {' '.join(settings) or 'nothing is set for NCCL'}", flush=True)
