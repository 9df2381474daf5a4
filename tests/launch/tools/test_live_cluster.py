"""`rlsys plan --address`: the nodes of a running cluster, from each of three sources."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray
from ray.core.generated import autoscaler_pb2 as messages
from ray.core.generated import autoscaler_pb2_grpc as services
from ray.core.generated import ray_client_pb2_grpc as clients
from ray.core.generated.ray_client_pb2 import KVGetResponse
from ray.exceptions import GetTimeoutError

from launch.tools.fitting.nodes import make_node
from launch.tools.plan import live_cluster
from rlsys.errors import ConfigError

DIED = ConnectionAbortedError(
    "Initialization failure from server:\nTraceback:\n  somewhere\nRuntimeError: no such process\n"
)
WHOLE = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}


# --- the GCS ---------------------------------------------------------------------------------------------------------------


class Gcs(services.AutoscalerStateServiceServicer):
    """Answers as the GCS of a cluster does, of three nodes, one of them dead."""

    refuses = False

    def GetClusterStatus(self, request, context):
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is missing or incorrect")
        reply = messages.GetClusterStatusReply()
        for address, status, gpus in [("10.0.0.1", "RUNNING", 1), ("10.0.0.2", "DEAD", 4), ("10.0.0.3", "IDLE", 4)]:
            free = WHOLE | {"GPU": gpus}
            reply.cluster_resource_state.node_states.add(
                node_ip_address=address, status=status, total_resources=WHOLE, available_resources=free
            )
        return reply


@pytest.fixture
def gcs(monkeypatch):
    """Its address, and what answers there."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    answers, server = Gcs(), grpc.server(ThreadPoolExecutor(2))
    services.add_AutoscalerStateServiceServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", answers
    server.stop(None).wait()


def test_each_living_node_has_its_free_resources(gcs):
    nodes = live_cluster.query_nodes(gcs[0])
    assert [(n.name, n.gpus, n.gpu.name, n.cpus) for n in nodes] == [
        ("10.0.0.1", 1, "H100", 8),
        ("10.0.0.3", 4, "H100", 8),
    ]


def test_a_refused_token_is_one_sentence_with_a_hint(gcs):
    address, answers = gcs
    answers.refuses = True
    with pytest.raises(
        ConfigError, match=f"^--address: the Ray cluster at {address} demands a token.* `ray get-auth-token`"
    ):
        live_cluster.query_nodes(address)


def test_an_unknown_kind_of_gpu_is_one_sentence_with_a_hint(gcs, monkeypatch):
    monkeypatch.setitem(WHOLE, "accelerator_type:ABACUS", WHOLE["accelerator_type:H100"])
    monkeypatch.delitem(WHOLE, "accelerator_type:H100")
    with pytest.raises(ConfigError, match=r"^node 10.0.0.1 has GPUs of a kind that is not known \(ABACUS\); give"):
        live_cluster.query_nodes(gcs[0])


def test_a_name_for_several_sizes_means_the_smallest(gcs, monkeypatch):
    monkeypatch.setitem(WHOLE, "accelerator_type:A100", 1.0)
    monkeypatch.delitem(WHOLE, "accelerator_type:H100")
    node = live_cluster.query_nodes(gcs[0])[0]
    assert (node.gpu.name, node.ambiguous_name) == ("A100-40", "A100")
    monkeypatch.setitem(WHOLE, "accelerator_type:A100-80G", WHOLE["accelerator_type:A100"])
    monkeypatch.delitem(WHOLE, "accelerator_type:A100")
    node = live_cluster.query_nodes(gcs[0])[0]
    assert (node.gpu.name, node.ambiguous_name) == ("A100-80", "")


def test_a_node_without_cpus_takes_no_cpu_workers():
    nodes = [make_node("10.0.0.1", has, {}) for has in ({}, {"CPU": 8.0})]
    assert [(n.cpus, n.takes_cpu_workers) for n in nodes] == [(0, False), (0, True)], "of the second others have them"


def test_a_silent_listener_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(live_cluster, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
            live_cluster.query_nodes(address)


def test_another_ray_service_at_the_address_is_recognized(gcs):
    address, _ = gcs
    with pytest.raises(
        ConfigError, match=f"ray://{address} .another service does; a GCS is HEAD:6379, a Ray client server"
    ):
        live_cluster.query_nodes(f"ray://{address}")


def test_the_address_of_the_dashboard_is_refused():
    with pytest.raises(ConfigError, match="plan asks the cluster itself: HEAD:6379"):
        live_cluster.query_nodes("http://head:8265")


def test_an_address_without_a_port_has_the_default_port():
    assert live_cluster.split_address("head") == ("head", 6379)
    assert live_cluster.split_address("ray://head") == ("head", 10001)
    assert live_cluster.join_address(*live_cluster.split_address("[::1]:7000")) == "[::1]:7000"
    with pytest.raises(ConfigError, match="--address is head:many; a cluster's is HEAD:6379"):
        live_cluster.split_address("head:many")


def test_the_gcs_of_a_client_server_is_found(monkeypatch):
    class Process:
        def __init__(self, line):
            self.info = {"cmdline": line and line.split()}

    lines = [
        "python -m ray.util.client.server --address=10.0.0.7:7000 --host=10.0.0.7 --port=7001 --mode=proxy",
        "python -m ray.util.client.server --address=10.0.0.7:8000 --host=10.0.0.7 --port=8001 --mode=proxy",
        None,
    ]
    monkeypatch.setattr(live_cluster.psutil, "process_iter", lambda _: map(Process, lines))
    assert live_cluster.find_gcs("ray://127.0.0.1:8001") == "10.0.0.7:8000"
    assert live_cluster.find_gcs("ray://10.0.0.7:7001") == "10.0.0.7:7000"
    assert live_cluster.find_gcs("ray://far:8001") == ""
    assert live_cluster.find_gcs("ray://far:10001") == "far:6379"


def test_no_client_is_needed_if_the_gcs_answers(gcs, monkeypatch):
    address, _ = gcs
    monkeypatch.setattr(live_cluster, "require_listener", lambda _: None)
    monkeypatch.setattr(live_cluster, "find_gcs", lambda _: address)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("a client"))
    assert len(live_cluster.query_nodes("ray://127.0.0.1:1")) == 2


# --- the report of the autoscaler ------------------------------------------------------------------------------------------


class Clients(clients.RayletDriverServicer):
    """Answers as Ray's server for clients does: of a cluster of two nodes, one of which has a GPU and two CPUs in use."""

    def __init__(self):
        self.report = {
            "time": time.time(),
            "load_metrics_report": {"usage_by_node": {"a": self.node("10.0.0.1", 1, 2), "b": self.node("10.0.0.2")}},
        }

    @staticmethod
    def node(address, gpus=0, cpus=0):
        used = {"CPU": (cpus, 8.0), "GPU": (gpus, 4.0), "accelerator_type:H100": (0, 1.0)}
        return used | {"node:__internal_head__": (0, 1.0), f"node:{address}": (0, 1.0)}

    def KVGet(self, request, context):
        if self.report is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is missing or incorrect")
        assert request.key == b"__autoscaling_status"
        return KVGetResponse(value=json.dumps(self.report).encode() if self.report else None)


@pytest.fixture
def served(monkeypatch):
    """Its `ray://` address, and what answers there."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("a client"))
    answers, server = Clients(), grpc.server(ThreadPoolExecutor(2))
    clients.add_RayletDriverServicer_to_server(answers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"ray://127.0.0.1:{port}", answers
    server.stop(None).wait()


def test_the_report_of_the_autoscaler_is_read_without_a_client(served):
    nodes = live_cluster.query_nodes(served[0])
    assert [(n.name, n.gpus, n.gpu.name, n.cpus) for n in nodes] == [
        ("10.0.0.1", 3, "H100", 6),
        ("10.0.0.2", 4, "H100", 8),
    ]


def test_without_a_recent_report_of_nodes_a_client_is_needed(served, monkeypatch):
    address, answers = served
    monkeypatch.setattr(live_cluster, "query_as_client", lambda _: [])
    assert len(live_cluster.query_nodes(address)) == 2
    answers.report["time"] -= 60
    assert live_cluster.query_nodes(address) == []
    answers.report = {"time": time.time(), "load_metrics_report": {"usage_by_node": None}}
    assert live_cluster.query_nodes(address) == []
    answers.report = {}
    assert live_cluster.query_nodes(address) == []


def test_a_client_server_that_refuses_the_token_is_named(served):
    address, answers = served
    answers.report = None
    with pytest.raises(ConfigError, match=f"^--address: the Ray cluster at {address[6:]} demands a token"):
        live_cluster.query_nodes(address)


# --- a Ray client ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fails(monkeypatch):
    """What joining a cluster as a client raises, time after time; then it succeeds."""
    raised = []

    def init(**_):
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "get", lambda *_, **__: {})
    monkeypatch.setattr(ray.remote_function.RemoteFunction, "_remote", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(live_cluster, "require_listener", lambda _: None)
    monkeypatch.setattr(live_cluster, "call_service", lambda *_: None)
    return raised


def test_a_client_process_that_dies_at_its_start_is_tried_again(fails):
    fails += [DIED]
    assert live_cluster.query_nodes("ray://127.0.0.1:1") == []
    assert not fails


def test_a_cluster_that_cannot_be_joined_is_named_with_the_cause(fails):
    fails += [DIED, DIED]
    with pytest.raises(ConfigError, match=r"ray://127.0.0.1:1 \(.*no such process\)"):
        live_cluster.query_nodes("ray://127.0.0.1:1")
    fails += [ConnectionError("refused"), DIED]
    with pytest.raises(ConfigError, match=r"\(refused\)"):
        live_cluster.query_nodes("ray://127.0.0.1:1")
    assert fails == [DIED], "nothing else is tried twice"


def test_a_task_of_the_client_sees_what_each_node_has_free(fails, monkeypatch):
    node = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": WHOLE}
    nodes = [node, node | {"NodeID": "b"}, node | {"NodeID": "c"}, node | {"NodeID": "d", "Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get", lambda *_, **__: {"b": WHOLE | {"GPU": 3.0, "CPU": 2.0}, "c": {}})
    free = [(n.gpus, n.cpus) for n in live_cluster.query_nodes("ray://127.0.0.1:1")]
    assert free == [(4, 8.0), (3, 2.0), (0, 0)], "the first has just come: nobody has had it yet"


def test_a_task_that_does_not_end_is_an_error(fails, monkeypatch):
    def late(*_, timeout):
        raise GetTimeoutError(f"Get timed out after {timeout} s")

    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(ConfigError, match=r"ray://127.0.0.1:1 \(Get timed out after 30.0 s\)"):
        live_cluster.query_nodes("ray://127.0.0.1:1")
