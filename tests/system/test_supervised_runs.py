"""Supervised training with real ranks and no engines: killed, it ends bit for bit as one left alone; and GRPO goes on from it."""

import signal
from pathlib import Path

import pytest
from killing import LIGHT, ROOT, Run, require_equal, running

CONFIG = ROOT / "configs" / "sft_cpu.yaml"
SHORT = ["trainer.steps=8", "checkpoint.every=3", "eval.every=4", "policy.warmup_updates=2", "policy.zero_stage=3"]


def test_killed_ranks_and_drivers_change_nothing_and_grpo_starts_from_the_weights(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with running(tmp_path / "alone", *SHORT, config=CONFIG, environment=environment) as alone:
        assert alone.wait() == 0, alone.text()
        losses = [line["eval/copy/loss"] for line in alone.lines() if "eval/copy/loss" in line]
        assert len(losses) == 3
        assert losses[0] > losses[1] > losses[2]
        assert "rollout engines" not in alone.text()
        assert f"copy: held-out loss {losses[0]:.4f} before, {losses[2]:.4f} after 8 steps" in alone.text()

    run = Run(tmp_path / "run", *SHORT, config=CONFIG, environment=environment).start()
    try:
        run.until_step(4)
        run.kill("policy-1")
        run.until(lambda: run.events("restart"))
        run.until_step(5)
        run.end()
        run.start()
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    require_equal(alone.path, run.path)

    exported = Run(tmp_path / "export", environment=environment)
    exported.command[3:] = ["export", str(run.path), str(tmp_path / "model")]
    assert exported.start().wait() == 0, exported.text()
    short = [
        f"model.path={tmp_path / 'model'}",
        "trainer.steps=1",
        "trainer.prompts_per_step=4",
        "eval.every=0",
        *LIGHT,
    ]
    with running(tmp_path / "grpo", *short, environment=environment) as grpo:
        assert grpo.wait() == 0, grpo.text()
        assert grpo.lines()[-1]["mismatch/max_abs"] < 1e-3


@pytest.mark.long
def test_a_stop_saves_the_step_and_the_same_command_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    lora = [*SHORT, "policy.lora.rank=4", "policy.lora.alpha=8", "policy.zero_stage=1", "checkpoint.every=0"]
    with running(tmp_path / "alone", *lora, config=CONFIG, environment=environment) as alone:
        assert alone.wait() == 0, alone.text()
    run = Run(tmp_path / "run", *lora, config=CONFIG, environment=environment).start()
    try:
        run.until_step(3)
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        assert "which is saved" in run.text()
        run.start()
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    require_equal(alone.path, run.path)
