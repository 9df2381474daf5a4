"""A run on a Ray cluster of two nodes that it joins as a job: the job is stopped and submitted again, and a node is lost."""

import contextlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from killing import ROOT, STEPS, Run, require_equal

from workers.process import free_port

RAY = str(Path(sys.executable).parent / "ray")
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # two addresses of the loopback, as if they were two machines


class Cluster:
    def __init__(self, environment: dict[str, str]):
        self.folder, self.nodes = Path(environment["TMPDIR"]) / "r", {}
        self.port, self.dashboard = free_port(), free_port()
        (self.folder / "tmp").mkdir(parents=True)
        self.environment = environment | {
            "TMPDIR": str(self.folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",  # no interface has these addresses for its own
        }

    def start(self) -> None:
        head = [f"--port={self.port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}"]
        self.node(HEAD, "--head", *head, f"--temp-dir={self.folder}")
        self.wait_for(1)
        self.node(OTHER, f"--address={HEAD}:{self.port}")
        self.wait_for(2)

    def node(self, address: str, *options: str) -> None:
        names = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
        ports = [f"--{name}-port={free_port()}" for name in names]
        size = ["--num-cpus=2", f"--object-store-memory={128 << 20}"]
        command = [RAY, "start", "--block", f"--node-ip-address={address}", *size, *ports, *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.nodes[address] = subprocess.Popen(command, env=self.environment, **quiet)

    def wait_for(self, count: int, timeout_s: float = 200) -> None:
        """Until so many nodes are there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, KeyError, TypeError):
                nodes = self.ask("/nodes?view=summary")["data"]["summary"]
                if sum(node["raylet"]["state"] == "ALIVE" for node in nodes) == count:
                    return
            time.sleep(0.2)
        raise AssertionError(f"no {count} nodes")

    def stop(self, job: str) -> None:
        """As `ray job stop` does, which takes seconds to start."""
        assert self.ask(f"/api/jobs/{job}/stop", method="POST") == {"stopped": True}

    def ask(self, path: str, **more: Any) -> Any:
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.dashboard}{path}", headers=token, **more)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def lose(self, address: str) -> None:
        """Kills the node's raylet and all that it has started, as when the machine is lost."""
        [raylet] = [p for p in psutil.Process(self.nodes[address].pid).children() if p.name() == "raylet"]
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [p := psutil.Process(node.pid), *p.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            node.wait()
        shutil.rmtree(self.folder)


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    cluster = Cluster(environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


class Job(Run):
    """`ray job submit`, which shows what the job says, and ends with it."""

    def __init__(self, cluster: Cluster, path: Path, *overrides: str):
        super().__init__(path, *overrides, environment=cluster.environment)
        self.cluster, self.train = cluster, self.command

    def submit(self, name: str) -> "Job":
        address = f"--address=http://127.0.0.1:{self.cluster.dashboard}"
        patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}})
        options = [address, f"--submission-id={name}", f"--runtime-env-json={patience}"]
        self.command = [RAY, "job", "submit", *options, "--", *self.train]
        self.start()
        return self

    def places(self) -> dict[str, str]:
        """The node of each worker."""
        return {p.stem: json.loads(p.read_text())["node"] for p in (self.path / "logs").glob("*.pid")}


def test_a_job_that_is_stopped_and_submitted_again_and_then_loses_a_node_ends_as_the_run_that_was_left_alone(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path / "run", *STEPS).submit("one")
    job.until_step(3)
    job.kill("policy-0", signal.SIGSTOP)
    cluster.stop("one")
    time.sleep(5)  # Ray by itself would have killed everything after 3 s
    job.kill("policy-0", signal.SIGCONT)
    job.wait(90)
    done = job.lines()[-1]["step"]
    assert f"stopped after step {done}, which is saved. Resume with: rlsys train" in job.text()
    assert (job.path / "checkpoints" / f"step-{done:06}").is_dir()
    assert not job.events("restart")

    job.submit("two")
    job.until_step(done + 1)
    assert len(set(job.places().values())) == 2, "both nodes have a part in it"
    cluster.lose(OTHER)
    assert job.wait() == 0, job.text()
    assert f"resumed from {job.path}/checkpoints/step-{done:06}" in job.text()
    assert job.events("replaced") or job.events("restart")
    require_equal(undisturbed, job.path)
