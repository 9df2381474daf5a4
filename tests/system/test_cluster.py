"""A run on a Ray cluster of three hosts that it joins as a job: the job is stopped and submitted again, and a host is lost."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clusters import RAY, Cluster, cluster_of_three
from killing import STEPS, Run, require_equal, running

pytestmark = pytest.mark.long


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    with cluster_of_three(environment) as cluster:
        yield cluster.start(*cluster.others)


class Job(Run):
    """`ray job submit`, which shows what the job says, and ends with it."""

    def __init__(self, cluster: Cluster, path: Path, *overrides: str):
        super().__init__(path, *overrides, environment=cluster.environment)
        self.cluster, self.train = cluster, ["rlsys", *self.command[3:]]

    def submit(self, name: str) -> "Job":
        address = f"--address={self.cluster.url}"
        patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}})
        options = [address, f"--submission-id={name}", f"--runtime-env-json={patience}"]
        self.command = [RAY, "job", "submit", *options, "--", *self.train]
        self.start()
        return self

    def process_of(self, worker: str) -> psutil.Process:
        """By its number in its host, which is another one outside."""
        place = json.loads((self.path / "logs" / f"{worker}.pid").read_text())
        alike = [p for p in psutil.process_iter() if p.create_time() == place["created"]]
        [process] = [p for p in alike if place["pid"] in numbers(p)]
        return process

    def places(self) -> dict[str, str]:
        """The node of each worker."""
        return {p.stem: json.loads(p.read_text())["node"] for p in (self.path / "logs").glob("*.pid")}


def numbers(process: psutil.Process) -> list[int]:
    """Of a process, as those see it who share its host, and others."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return [int(n) for line in status if line.startswith("NSpid:") for n in line.split()[1:]]


def test_a_job_that_is_stopped_and_submitted_again_and_then_loses_a_host_ends_as_the_run_that_was_left_alone(
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
    places = job.places()
    assert len(set(places.values())) == 3, "every host has a part in it"
    for role in ("rollout", "policy", "reward"):
        assert places[f"{role}-0"] != places[f"{role}-1"], f"{role} is spread over hosts"
    assert "weights travel by object_store" in job.text()
    cluster.lose(cluster.others[0])
    assert job.wait() == 0, job.text()
    assert f"resumed from {job.path}/checkpoints/step-{done:06}" in job.text()
    assert job.events("replaced") or job.events("restart")
    require_equal(undisturbed, job.path)


def test_a_run_outlives_a_restart_of_the_head_of_its_cluster(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    """With the head go all that Ray knows, the run's processes and its driver. Nothing saves them."""
    # By default a driver waits for a minute for the same head to come back.
    cluster = Cluster(environment | {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"})
    try:
        cluster.start(cpus=8)
        at = cluster.environment | {"RAY_ADDRESS": f"{cluster.head}:{cluster.port}"}
        with running(tmp_path / "run", *STEPS, environment=at) as run:
            run.until_step(4)
            cluster.lose_head()
            run.until(lambda: run.events("restart"))
            cluster.start(cpus=8)
            assert run.wait() == 0, run.text()
        assert f"resumed from {run.path}/checkpoints/step-000003" in run.text()
        require_equal(undisturbed, run.path)
    finally:
        cluster.end()
