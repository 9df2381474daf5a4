"""A real run whose rewards ask a frozen engine. It is killed and stopped, and every figure, sample and weight is the same."""

import signal
from pathlib import Path

import pytest
from aiming import aim
from killing import LIGHT, ROOT, Run, require_equal, running

pytestmark = pytest.mark.long

JUDGED = [f"reward.functions={{zigzag: 1.0, '{ROOT}/tests/system/own_verdict.py:likeness': 0.5}}", *LIGHT]
JUDGED += ["models={judge: {path: 'builtin:tiny'}}", "trainer.steps=5", "trainer.prompts_per_step=8", "eval.every=0"]
JUDGED += ["checkpoint.every=2", "watchdog.stall_s=12", "reference.kl_coef=0"]


def test_a_run_goes_on_as_if_nothing_had_been_when_its_judge_is_killed_and_stopped(
    environment: dict[str, str], tmp_path: Path
) -> None:
    left_alone = Run(tmp_path / "left_alone", *JUDGED, environment=environment).start()
    assert left_alone.wait() == 0, left_alone.text()
    last = left_alone.lines()[-1]
    assert 0 < last["reward/component/likeness/greedy"] < 1, "it asks"
    with running(tmp_path / "run", *JUDGED, environment=environment) as run:
        run.kill("model-judge-0")  # while it starts
        run.until_step(1)
        aim(run, "rollout", "model-judge-0", share=0.3)
        run.until(lambda: run.events("replaced")[1:])
        run.until_step(3)
        run.kill("model-judge-0", signal.SIGSTOP)
        assert run.wait() == 0, run.text()
    assert [e["worker"] for e in run.events("replaced") if e["worker"].startswith("model")] == ["model-judge-0"] * 3
    assert run.events("stall")[0]["waiting_for"] == ["model-judge-0"]
    require_equal(tmp_path / "left_alone", tmp_path / "run")
