"""`rlsys plan --address` on a Ray cluster that is running: what is missing of it; nothing is started there."""

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from killing import ROOT

from workers.process import free_port

RAY = str(Path(sys.executable).parent / "ray")


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Its address, that for clients, and what these need: a head that says it has four H100 and six CPUs."""
    port, client = free_port(), free_port()
    folder = Path(environment["TMPDIR"]) / "r"
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    names = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
    command = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=6"]
    command += ["--num-gpus=4", '--resources={"accelerator_type:H100": 1}', f"--object-store-memory={128 << 20}"]
    command += [f"--temp-dir={folder}", f"--dashboard-port={free_port()}", f"--ray-client-server-port={client}"]
    command += [f"--{name}-port={free_port()}" for name in names]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen(command, env=environment, **quiet)
    try:
        yield f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}", environment
    finally:
        everyone = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(30)
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone, timeout=10)
        for path in [folder, *folder.parent.glob("pymp-*")]:  # Ray's server for clients leaves one
            shutil.rmtree(path, ignore_errors=True)


def plan(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launch", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)


def test_a_running_cluster_is_looked_at_and_told_what_it_lacks(cluster, tmp_path):
    address, client, environment = cluster
    figures = tmp_path / "figures.json"
    deadline = time.monotonic() + 90
    while not figures.is_file() and time.monotonic() < deadline:
        done = plan(environment, "configs/dapo_7b_gpu.yaml", "--address", address, "--json", str(figures))
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "All together need 8 GPUs: rollout.engines (8) 8. The cluster has 4." in text
    assert "rollout-4 + policy-4 to rollout-7 + policy-7: no node has 1 GPU each left." in text
    found = json.loads(figures.read_text())
    [node] = found["cluster"]["nodes"]
    assert (node["gpus"], node["gpu"]["name"], node["cpus"]) == (4, "H100", 6)

    four = ["rollout.engines=4", "policy.ranks=4"]
    fits = plan(environment, "configs/dapo_7b_gpu.yaml", *four, "policy.offload_optimizer=true", "--address", address)
    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert "4 x H100 in 1 node" in fits.stdout

    (tmp_path / "figures.json").unlink()
    plan(environment, "configs/dapo_7b_gpu.yaml", "--address", client, "--json", str(figures))
    assert json.loads(figures.read_text())["cluster"]["nodes"] == found["cluster"]["nodes"]
