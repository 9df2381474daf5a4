"""A Ray cluster that is running, looked at and left as it is: its nodes, and what of them is free."""

import os
import socket
from threading import Thread

from rlsys.config import ConfigError
from rlsys.devices import Node, named

PATIENCE_S = 5.0
KIND = "accelerator_type:"
STILLBORN = ("Initialization failure", "Starting Ray client server failed")


def nodes_at(address: str) -> list[Node]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    answers(address)
    import ray

    try:
        joined(address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        cause = str(error).strip().rpartition("\n")[2]
        raise ConfigError(f"--address: no Ray cluster answers at {address} ({cause}).") from None
    try:
        nodes = [n for n in ray.nodes() if n["Alive"]]
        free = _free(nodes)
        return [_node(n, free.get(n["NodeID"])) for n in nodes]
    finally:
        Thread(target=ray.shutdown).start()  # a client's takes half a second, in which the plan can be made


def joined(address: str) -> None:
    """Ray's server for clients has a process for each of them; now and then one dies as it starts, and the next does not."""
    import ray

    for last in (False, True):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
            return
        except RuntimeError as error:
            if last or not any(said in str(error) for said in STILLBORN):
                raise


def answers(address: str) -> None:
    """Raises `ConfigError` where nobody listens: Ray would try for a minute."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()
    except OSError as error:
        raise ConfigError(f"--address: no Ray cluster answers at {address} ({error.strerror or error}).") from None


def _free(nodes: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """By node. A client of `ray://` is only told what all nodes together have."""
    import ray
    from ray._private.state import available_resources_per_node

    try:
        return dict(available_resources_per_node())
    except Exception:  # whatever Ray raises where it keeps no state of its own
        return {str(n["NodeID"]): ray.available_resources() for n in nodes} if len(nodes) == 1 else {}


def _node(n: dict[str, object], free: dict[str, float] | None) -> Node:
    resources = n["Resources"]
    assert isinstance(resources, dict)
    have = resources if free is None else free
    kinds = [name.removeprefix(KIND) for name in resources if name.startswith(KIND)]
    gpu = named(kinds[0]) if kinds else None
    gpus = int(have.get("GPU", 0))
    if gpus and gpu is None:
        raise ConfigError(
            f"node {n['NodeManagerAddress']} has GPUs of a kind that is not known ({', '.join(kinds) or 'none is named'}); "
            "give --cluster instead."
        )
    # Ray's figure for memory is not what the node has: a part of that, for bookkeeping.
    return Node(gpus, gpu, have.get("CPU", 0), 0, str(n["NodeManagerAddress"]))
