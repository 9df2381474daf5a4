"""Real runs whose processes are killed for real, at many moments. Each must end as the run that was left alone: every figure, every
sample and every weight, bit for bit.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import Run, require_equal, running
from soak import leftovers

STEPS = ["trainer.steps=10", "checkpoint.every=3", "eval.every=5", "trainer.prompts_per_step=8"]
AHEAD = [*STEPS, "pipeline.max_lag=1", "policy.zero_stage=3", "dynamic_sampling.enabled=true", "rollout.engines=1"]
AHEAD += ["reference.kl_coef=0", "watchdog.stall_s=20", "reward.timeout_s=5"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, no shared memory and no temporary folder, whatever was killed."""
    before = leftovers()
    yield
    for _ in range(100):
        if not leftovers() - before:
            return
        time.sleep(0.1)
    assert leftovers() - before == set()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run = Run(path, *STEPS).start()
    assert run.wait() == 0, run.text()
    return path


def test_whatever_is_killed_the_run_goes_on_by_itself_and_ends_as_if_nothing_had_been(
    undisturbed: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "run", *STEPS) as run:
        run.kill("rollout-1")  # while it starts
        run.until_step(1)
        run.kill("rollout-0")
        run.until_step(2)
        run.kill("reward-1")
        run.until_step(3)
        run.kill("reference")
        run.until_step(5)
        run.kill("policy-1")
        run.until(lambda: run.events("restart"))
        run.kill("reference")  # while it starts
        assert run.wait() == 0, run.text()
    assert {e["worker"] for e in run.events("replaced")} >= {"rollout-0", "rollout-1", "reference"}
    assert [e["cause"] for e in run.events("restart")] == ["it lost a worker"]
    assert "policy-1 died" in run.text()
    require_equal(undisturbed, tmp_path / "run")


def test_a_machine_that_is_lost_a_rank_that_is_stopped_and_a_preemption_change_nothing(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", *STEPS, "watchdog.stall_s=20", "reward.timeout_s=5").start()
    run.until_step(4)
    run.end()  # all of it at once
    run.command.append("rollout.engines=1")  # the cluster comes back smaller
    run.start()
    run.until_step(5)
    run.kill("policy-0", signal.SIGSTOP)
    began = time.time()
    [stall] = run.until(lambda: run.events("stall"))
    assert "policy-0" in stall["waiting_for"]
    assert stall["time"] - began < 20 + 5
    assert "Thread" in stall["stacks"]["policy-0"], stall
    run.until_step(7)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(60) == 0, run.text()
    assert "which is saved. Resume with: rlsys train" in run.text()
    run.command.append("rollout.engines=2")
    assert run.start().wait() == 0, run.text()
    require_equal(undisturbed, tmp_path / "run")


def test_one_step_ahead_with_zero_3_and_dynamic_sampling_too(tmp_path: Path) -> None:
    alone = Run(tmp_path / "alone", *AHEAD).start()
    assert alone.wait() == 0, alone.text()
    with running(tmp_path / "run", *AHEAD) as run:
        run.until_step(3)
        run.kill("rollout-0", signal.SIGSTOP)
        run.until(lambda: run.events("replaced"))
        run.until_step(5)
        run.family()[1].kill()  # the driver
        assert run.wait() == 0, run.text()
    assert "rollout-0" in run.events("stall")[0]["stacks"]
    assert [e["cause"] for e in run.events("restart")] == ["the driver was ended by SIGKILL"]
    require_equal(tmp_path / "alone", tmp_path / "run")
