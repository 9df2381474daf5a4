"""`rlsys plan --address` on a Ray cluster that is running: what is missing of it; nothing is started there."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import OTHER, Cluster
from killing import ROOT

CONFIG = "configs/dapo_7b_gpu.yaml"
FOUR_GPUS = ("--num-gpus=4", '--resources={"accelerator_type:H100": 1}')
# Somebody else, who has one GPU of the node that he is on until his input ends.
TAKES_ONE = """
import ray
ray.init("auto", log_to_driver=False)
taken = ray.util.placement_group([{"GPU": 1}])
ray.get(taken.ready())
print("taken", flush=True)
input()
"""

# A client of Ray, for where no autoscaler tells of nodes.
LOOKS = """
import sys
from launch.tools.plan.live_cluster import query_as_client
print(sorted(node.gpus for node in query_as_client(sys.argv[1])))
"""


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    """Two nodes that say each that they have four H100 and six CPUs."""
    started = Cluster(environment)
    try:
        yield started.start(OTHER, cpus=6, options=FOUR_GPUS)
    finally:
        started.end()


def plan(cluster: Cluster, address: str, figures: Path, *words: str) -> tuple[int, str, list[tuple[int, str, float]]]:
    """The exit code, what it says, and of each node its free GPUs, their kind and its free CPUs."""
    command = [sys.executable, "-m", "launch", "plan", CONFIG, *words, "--address", address, "--json", str(figures)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    done = subprocess.run(command, env=cluster.environment | {"COLUMNS": "100"}, **options)
    assert figures.is_file(), done.stdout + done.stderr
    nodes = json.loads(figures.read_text())["cluster"]["nodes"]
    figures.unlink()
    return done.returncode, done.stdout, sorted((n["gpus"], n["gpu"]["name"], n["cpus"]) for n in nodes)


@contextlib.contextmanager
def tunnel(host: str, port: int) -> Iterator[int]:
    """A port of this machine that leads there, as with `ssh -L`."""

    def carry(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := a.recv(1 << 16):
                b.sendall(some)
            b.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = entrance.accept()[0], socket.create_connection((host, port))
                for a, b in (ends, ends[::-1]):
                    threading.Thread(target=carry, args=(a, b), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as entrance:
        threading.Thread(target=serve, daemon=True).start()
        yield entrance.getsockname()[1]
        entrance.shutdown(socket.SHUT_RDWR)


def test_a_running_cluster_is_looked_at_and_told_what_it_lacks(cluster, tmp_path):
    address, client = f"{cluster.head}:{cluster.port}", f"ray://{cluster.head}:{cluster.clients}"
    figures, whole, begun = tmp_path / "figures.json", (4, "H100", 6), (3, "H100", 6)
    code, text, nodes = plan(cluster, address, figures, "policy.offload_optimizer=true")
    assert (code, nodes) == (0, [whole, whole]), text
    assert "8 x H100 in 2 nodes" in text

    environment = cluster.environment | {"RAY_ADDRESS": address}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", TAKES_ONE], env=environment, **pipes) as somebody:
        assert somebody.stdout.readline() == "taken\n"
        deadline = time.monotonic() + 20
        while begun not in plan(cluster, address, figures)[2] and time.monotonic() < deadline:
            time.sleep(0.5)  # the cluster does not know it at once
        for way in (address, client):
            code, text, nodes = plan(cluster, way, figures)
            assert (code, nodes) == (1, [begun, whole]), text
            assert (
                "All together need 8 GPUs: rollout.engines (8) × rollout.tensor_parallel (1) 8. The cluster has 7."
                in text
            )
            assert "rollout-7 + policy-7: no node has 1 GPU left." in text
        with tunnel(
            cluster.head, cluster.clients
        ) as port:  # whose end cannot be told from here: its autoscaler is asked
            deadline = time.monotonic() + 20
            while begun not in (nodes := plan(cluster, f"ray://127.0.0.1:{port}", figures)[2]):
                assert time.monotonic() < deadline, nodes
                time.sleep(0.5)  # it looks every five seconds
            assert nodes == [begun, whole]
            looks = [sys.executable, "-c", LOOKS, f"ray://127.0.0.1:{port}"]
            looked = subprocess.run(
                looks, env=cluster.environment, capture_output=True, text=True, timeout=120, cwd=ROOT
            )
            assert looked.stdout == "[3, 4]\n", looked.stderr
        somebody.communicate("\n", timeout=30)
