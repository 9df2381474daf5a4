"""Real runs whose processes are killed for real, at many moments. Each must end as the run that was left alone: every figure, every
sample and every weight, bit for bit.
"""

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import trackers
from aiming import aim
from killing import LIGHT, ROOT, STEPS, Run, outcome, require_equal, running
from safetensors.numpy import load_file

STALL_S = 12
PATIENCE = [f"watchdog.stall_s={STALL_S}", "reward.timeout_s=5"]
CRITIC = [
    "trainer.steps=6",
    "checkpoint.every=2",
    "eval.every=3",
    "trainer.prompts_per_step=16",
    "critic.alone_steps=1",
]
CRITIC += ["critic.ranks=2", *PATIENCE, *LIGHT, "policy.ranks=2", "policy.zero_stage=3", "pipeline.max_lag=1"]


def stop(run: Run, worker: str, phase: str = "", doing: str = "") -> None:
    """Stops a worker, in a phase if one is named, and requires that the run says so in time, and what waited for it."""
    aim(run, phase, worker, signal.SIGSTOP) if phase else run.kill(worker, signal.SIGSTOP)
    began, before = time.time(), len(run.events("stall"))
    stall = run.until(lambda: run.events("stall")[before:])[0]
    assert worker in stall["waiting_for"], stall
    assert doing in stall["doing"], stall
    assert "Thread" in stall["stacks"][worker], stall
    assert stall["time"] - began < STALL_S + 8


def test_whatever_is_killed_the_run_ends_as_if_nothing_had_been_and_trackers_have_each_step_once(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment |= trackers.variables(tmp_path)
    run = Run(tmp_path / "run", *STEPS, trackers.EVERY_TRACKER, environment=environment).start()
    try:
        run.kill("rollout-1")  # while it starts
        run.until_step(1)
        trackers.require_all_figures(run.until(lambda: trackers.page(run.path)))
        aim(run, "rollout", "rollout-0", share=0.3)
        run.until_step(3)
        run.kill("reward-1")
        run.until_step(4)
        run.kill("reference")
        aim(run, "update", "policy-1", share=0.3)
        run.until(lambda: run.events("restart"))
        run.kill("reference")  # while it starts
        run.until_step(5)
        assert {e["worker"] for e in run.events("replaced")} >= {"rollout-0", "rollout-1", "reference"}
        count = len(run.events("replaced"))
        assert "policy-1 died" in run.text()

        run.end()  # all of it at once
        run.command += ["rollout.engines=1", *PATIENCE]  # the cluster comes back smaller
        run.start()
        stop(run, "reference", phase="rollout", doing="scoring by the reference")
        stop(run, "rollout-0", phase="update", doing="loading weights")  # the sync is the next to need it
        replaced = [e["worker"] for e in run.until(lambda: run.events("replaced")[count + 1 :])]
        assert replaced == ["rollout-0"]
        run.until_step(7)
        stop(run, "policy-0")
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    assert {e["cause"] for e in run.events("restart")} == {"it lost a worker"}
    require_equal(undisturbed, tmp_path / "run")
    trackers.require_each_step_once(tmp_path / "run", monkeypatch)


@pytest.mark.long
def test_ppo_one_step_ahead_with_zero_3_and_a_critic_one_rank_of_which_is_killed_and_one_stalls_too(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ppo = {"config": ROOT / "configs" / "ppo.yaml", "environment": environment}
    undisturbed = Run(tmp_path / "alone", *CRITIC, **ppo).start()
    assert undisturbed.wait() == 0, undisturbed.text()
    lines = undisturbed.lines()
    assert [line["lag"] for line in lines[1:]] == [0] + [1] * 5
    assert [("loss" in line, "critic/loss" in line) for line in lines[1:]] == [(False, True)] + [(True, True)] * 5
    assert lines[1]["critic/value_mean"] == 0, "nothing is expected at first"
    assert lines[-1]["critic/value_mean"] != 0
    with running(tmp_path / "run", *CRITIC, **ppo) as run:
        run.until_step(3)
        run.kill("critic-1")
        run.until(lambda: run.events("restart"))
        stop(run, "critic-0", phase="rollout")
        assert run.wait() == 0, run.text()
    assert {e["cause"] for e in run.events("restart")} == {"it lost a worker"}
    assert "critic-1 died" in run.text()
    require_equal(tmp_path / "alone", tmp_path / "run")


def weights(run: Path) -> dict[str, np.ndarray]:
    """Of its checkpoint of step 10. With ZeRO 3 each rank writes a file."""
    files = sorted((run / "checkpoints" / "step-000010" / "model").glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def test_other_ranks_and_another_zero_stage_go_on_with_the_same_samples_and_differ_by_rounding(
    environment: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    for step in (9, 10):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06}")
    run = Run(tmp_path / "run", *STEPS, *LIGHT, "policy.zero_stage=3", environment=environment).start()
    assert run.wait() == 0, run.text()
    assert "resumed from" in run.text()

    def samples(path: Path, step: int) -> list[tuple[str, str, float]]:
        rows = pyarrow.parquet.read_table(path / "samples" / f"step-{step:06}.parquet").to_pylist()
        return [(r["uid"], r["completion"], r["reward"]) for r in rows]

    assert samples(run.path, 7) == samples(undisturbed, 7)
    whole, mine = (outcome(p)["lines"] for p in (undisturbed, run.path))
    assert mine[:7] == whole[:7]
    for a, b in zip(mine[7:], whole[7:], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=2e-5)
    one, other = weights(undisturbed), weights(run.path)
    assert one.keys() == other.keys()
    assert max(float(np.abs(one[name] - other[name]).max()) for name in one) < 1e-5
