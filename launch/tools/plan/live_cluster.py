"""Reads the nodes of a running Ray cluster and what is free on them, without changing the cluster.

There are three sources, tried in this order:

1. The GCS of the head node. It answers at once, also to machines outside the cluster. For a `ray://` address it usually
   runs on the same host.
2. The report of the autoscaler, which the Ray client server reads out. It is written every five seconds.
3. A Ray client, which makes the cluster start two processes.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import psutil

from launch.ray_session.token import explain_token_refusal, use_token_if_available
from launch.tools.estimates.devices import NodeSpec
from launch.tools.fitting.nodes import make_node
from rlsys.errors import ConfigError

TIMEOUT_S = 5.0
FRESH_S = 10.0  # an older report of the autoscaler means that it has died
TASK_S = 30.0  # for Ray to start a process for a task and return its result
ADDRESS = "node:"  # prefix of the resource that names a node
CLIENTS = "ray://"
USUAL_GCS, USUAL_CLIENTS = 6379, 10001  # ports of `ray start --head`


class NoAnswerError(Exception):
    """The Ray service is not at this address, or does not answer."""


def query_nodes(address: str) -> list[NodeSpec]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"--address is {address}; plan asks the cluster itself: HEAD:{USUAL_GCS}, or ray://HEAD:{USUAL_CLIENTS}."
        )
    require_listener(address)
    try:
        if not address.startswith(CLIENTS):
            return query_gcs(local_gcs_address() if address == "auto" else join_address(*split_address(address)))
        if gcs := find_gcs(address):
            with suppress(NoAnswerError):  # it may be another service, or of another cluster
                return query_gcs(gcs)
        return query_autoscaler_report(join_address(*split_address(address))) or query_as_client(address)
    except ConfigError:  # it is a ValueError too, and already a sentence
        raise
    except (OSError, ValueError, RuntimeError, NoAnswerError) as error:
        cause = str(error).strip().rpartition("\n")[2]
        raise ConfigError(f"--address: no Ray cluster answers at {address} ({cause}).") from None


def require_listener(address: str) -> None:
    """Raises `ConfigError` if nothing listens at the address. A Ray client would try for a minute."""
    if address == "auto":
        return
    try:
        socket.create_connection(split_address(address), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"--address: no Ray cluster answers at {address} ({error.strerror or error}).") from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Without a port, the default of `ray start --head`."""
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        return url.hostname or "", url.port or (USUAL_CLIENTS if address.startswith(CLIENTS) else USUAL_GCS)
    except ValueError:
        raise ConfigError(
            f"--address is {address}; a cluster's is HEAD:{USUAL_GCS}, or ray://HEAD:{USUAL_CLIENTS}."
        ) from None


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- the GCS ----------------------------------------------------------------------------------------------------------


def local_gcs_address() -> str:
    """The cluster at RAY_ADDRESS, else the one that this machine belongs to. Raises `ConnectionError`."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die("auto"))


def find_gcs(address: str) -> str:
    """The address of the GCS that belongs to a Ray client server; empty if it cannot be known.

    A server on this machine names it on its command line. On another host, the GCS is taken to have its default port if
    the server has its own.
    """
    host, port = split_address(address)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        on_this_machine = host in ("127.0.0.1", "localhost", "::1") or f"--host={host}" in words
        if on_this_machine and "ray.util.client.server" in words and f"--port={port}" in words:
            return next((w.removeprefix("--address=") for w in words if w.startswith("--address=")), "")
    return join_address(host, USUAL_GCS) if port == USUAL_CLIENTS else ""


def query_gcs(address: str) -> list[NodeSpec]:
    """Raises `NoAnswerError`."""
    import ray  # noqa: F401  makes its generated modules importable
    from ray.core.generated.autoscaler_pb2 import DEAD, GetClusterStatusRequest
    from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub

    def ask(channel: Any) -> Any:
        return AutoscalerStateServiceStub(channel).GetClusterStatus(GetClusterStatusRequest(), timeout=TIMEOUT_S)

    states = call_service(address, ask).cluster_resource_state.node_states
    return [make_node(s.node_ip_address, s.total_resources, s.available_resources) for s in states if s.status != DEAD]


def call_service(address: str, ask: Callable[[Any], Any]) -> Any:
    """Calls a Ray service over gRPC. Raises `NoAnswerError`, or `ConfigError` if the token is the cause."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    shown = use_token_if_available()
    with init_grpc_channel(address) as channel:
        try:
            return ask(channel)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(f"--address: the Ray cluster at {address} {explain_token_refusal(shown)}") from None
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NoAnswerError(
                    f"another service does; a GCS is HEAD:{USUAL_GCS}, a Ray client server ray://HEAD:{USUAL_CLIENTS}"
                ) from None
            raise NoAnswerError(error.details()) from None


# --- the report of the autoscaler -------------------------------------------------------------------------------------


def query_autoscaler_report(clients: str) -> list[NodeSpec]:
    """Nodes in the autoscaler's report; empty without a recent report. Raises `NoAnswerError`."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.core.generated.ray_client_pb2 import KVGetRequest
    from ray.core.generated.ray_client_pb2_grpc import RayletDriverStub

    def ask(channel: Any) -> Any:
        request = KVGetRequest(key=DEBUG_AUTOSCALING_STATUS.encode())
        return RayletDriverStub(channel).KVGet(request, timeout=TIMEOUT_S, metadata=[("client_id", "plan")]).value

    report = json.loads(call_service(clients, ask) or "{}")
    nodes = report.get("load_metrics_report", {}).get("usage_by_node")  # of each resource: (used, total)
    if not nodes or abs(time.time() - report["time"]) > FRESH_S:
        return []
    return [parse_usage(usage) for usage in nodes.values()]


def parse_usage(usage: Mapping[str, tuple[float, float]]) -> NodeSpec:
    addresses = [name.removeprefix(ADDRESS) for name in usage if name.startswith(ADDRESS) and "__" not in name]
    total = {name: whole for name, (_, whole) in usage.items()}
    return make_node(
        addresses[0] if addresses else "", total, {name: whole - used for name, (used, whole) in usage.items()}
    )


# --- a Ray client -----------------------------------------------------------------------------------------------------


def query_as_client(address: str) -> list[NodeSpec]:
    """Runs a task that needs no resources: it sees what each node has free, while a client sees only the sum."""
    import ray
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError

    connect_client(address)
    try:
        task = ray.remote(num_cpus=0)(available_resources_per_node)
        free = ray.get(task.remote(), timeout=TASK_S)
        alive = [n for n in ray.nodes() if n["Alive"]]
        return [
            make_node(n["NodeManagerAddress"], n["Resources"], free.get(n["NodeID"], n["Resources"])) for n in alive
        ]
    except RayError as error:
        raise NoAnswerError(str(error)) from None
    finally:
        Thread(target=ray.shutdown).start()  # takes half a second, while the plan is made


def connect_client(address: str) -> None:
    """Tries twice: Ray starts a process for each client, and sometimes the process dies at its start."""
    import ray

    for last in (False, True):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
            return
        except ConnectionAbortedError:
            if last:
                raise
