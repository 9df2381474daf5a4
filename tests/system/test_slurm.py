"""launch/slurm.sbatch under a real Slurm of two hosts: its time runs out, it goes back into the queue, goes on, and is told to end."""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import NoHosts
from killing import LIGHT, ROOT, read
from slurm import Slurm, missing, slurm_of_two

pytestmark = pytest.mark.skipif("RLSYS_LONG" not in os.environ, reason="make slurm runs it")


@pytest.fixture
def slurm(environment: dict[str, str], tmp_path: Path) -> Iterator[Slurm]:
    if missing():
        pytest.skip(
            f"not installed: {', '.join(missing())} (Debian has them in slurmctld, slurmd, slurm-client and munge)"
        )
    own = Path(environment["TMPDIR"]) / "r"
    own.mkdir()
    (tmp_path / "slurm").mkdir()
    mine = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(own / "tmp"),
        "RAY_TMPDIR": str(own / "tmp"),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    try:
        with slurm_of_two(tmp_path / "slurm", [own], environment | mine | {"PYTHONPATH": str(ROOT)}, gpus=8) as slurm:
            yield slurm
    except NoHosts as error:
        pytest.skip(str(error))
    finally:
        own.rmdir()


def test_a_job_whose_time_is_up_saves_goes_back_into_the_queue_and_goes_on_until_it_is_told_to_end(
    slurm: Slurm, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    options = [
        f"run.dir={run}",
        "cluster.device=cpu",
        "trainer.steps=9000",
        "eval.every=0",
        *LIGHT,
        "reference.kl_coef=0",
    ]
    script = [str(ROOT / "launch" / "slurm.sbatch"), "configs/tiny_cpu.yaml", *options]
    assert slurm("sbatch", "--nodes=2", f"--output={log}", *script, folder=ROOT) == "Submitted batch job 1\n"
    slurm.until(lambda: len(read(run / "metrics.jsonl")) > 2 or slurm.over("1"), 150)
    nodes = {json.loads((run / "logs" / f"{name}.pid").read_text())["node"] for name in ("rollout-0", "policy-0")}
    assert len(nodes) == 2, log.read_text()
    assert "weights travel by object_store" in log.read_text()
    slurm("scancel", "--batch", "--signal=USR1", "1")
    slurm.until(lambda: "restarts 1" in slurm.state("1"))
    assert "which is saved. Resume with: rlsys train configs/tiny_cpu.yaml" in log.read_text()
    assert "time is nearly up: back into the queue, to go on from there" in log.read_text()
    done = read(run / "metrics.jsonl")[-1]["step"]
    slurm.until(lambda: read(run / "metrics.jsonl")[-1]["step"] > done, 150)
    assert f"resumed from {run}/checkpoints/step-{done:06}" in log.read_text()
    slurm("scancel", "--batch", "--signal=TERM", "1")
    slurm.until(lambda: slurm.over("1"))
    assert slurm.state("1") == "COMPLETED 0:0 restarts 1", log.read_text()
    steps = [line["step"] for line in read(run / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert f"stopped after step {steps[-1]}, which is saved." in log.read_text()
