"""Whole runs with settings less usual than the demo's, and runs that fail: what they say, and with which exit code."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from killing import LIGHT, few_held_out, running

SMALL = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "eval.every=2", "checkpoint.every=2"]
Rlsys = Callable[..., "subprocess.CompletedProcess[str]"]


def test_many_settings_in_one_run_that_is_told_to_stop_and_goes_on(
    environment: dict[str, str], rlsys: Rlsys, tmp_path: Path
) -> None:
    """A greedy baseline one step ahead, a correction, an adapted KL, entropy and length control, several
    epochs, bfloat16 on both sides, a reward of the user's own, and weights through the object store."""
    options = "algorithm.advantage=remax algorithm.loss=sapo algorithm.normalize=decoupled algorithm.kl=k3_unbiased "
    options += "correction.method=icepop reference.kl_coef=0.01 reference.kl_target=0.001 entropy.coef=0.001 "
    options += "entropy.control=kl_cov entropy.share=0.1 overlong.mask=true overlong.buffer=4 pipeline.max_lag=1 "
    options += "trainer.epochs_per_step=2 trainer.updates_per_step=4 "
    options += "rollout.temperature=0.8 rollout.dtype=bfloat16 policy.dtype=bfloat16 policy.zero_stage=3 "
    options += "policy.gradient_checkpointing=true policy.tokens_per_pack=40 policy.threads=2 policy.lr=1e-5 policy.lr_schedule=constant sync.transport=object_store"
    own = f"reward.functions={{{Path(__file__).parent}/own_reward.py:closeness: 0.5, zigzag: 1.0}}"
    settings = [few_held_out(tmp_path), own, *SMALL, *LIGHT, *options.split()]
    with running(tmp_path / "run", *settings, "trainer.steps=100000", environment=environment) as run:
        run.until_step(3)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(90) == 0, run.text()
    assert "which is saved. Resume with: rlsys train" in run.text()
    done = run.lines()[-1]["step"]
    run.command.append(f"trainer.steps={done + 1}")
    assert run.start().wait() == 0, run.text()
    assert f"resumed from {run.path}/checkpoints/step-{done:06}" in run.text()

    lines = run.lines()[1:]
    assert [line["step"] for line in lines] == list(range(1, done + 2))
    assert [line["lag"] for line in lines] == [0] + [1] * done
    assert all(line["correction/effective_share"] > 0.5 for line in lines)
    assert all(line["reward/overlong"] <= 0 for line in lines)
    assert all("reward/component/closeness" in line for line in lines)
    assert lines[0]["mismatch/mean_abs"] < 0.1, "bf16 on both sides"
    assert lines[-1]["kl_coef"] != 0.01
    assert [("eval/few/accuracy" in line) for line in lines[:3]] == [False, True, False]
    for step in (1, 2, done + 1):
        samples = pyarrow.parquet.read_table(run.path / "samples" / f"step-{step:06d}.parquet").to_pylist()
        assert len(samples) == 16
        assert len({s["uid"] for s in samples}) == 4

    other = rlsys(*run.command[3:], "policy.lr=1")
    assert other.returncode == 2
    assert "policy.lr: 1e-05 → 1.0" in other.stderr


@pytest.mark.long
def test_a_rank_that_dies_ends_a_run_that_may_not_restart_with_its_name_and_last_words(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = ["rollout.engines=1", "reward.workers=1", "reference.kl_coef=0", "run.max_restarts=0"]
    with running(tmp_path / "run", *options, environment=environment) as run:
        run.kill("policy-1")  # while it starts
        assert run.wait(120) == 1
    assert "starting the policy: policy-1 died" in run.text()
    assert "Last lines of" in run.text()
    assert "run.max_restarts is 0: the same command goes on" in run.text()


@pytest.mark.parametrize(
    ("rows", "overrides", "sentence"),
    [
        ('{"question": "123456>"}\n', [], "data.jsonl:1: the row has no field `prompt`; it has question"),
        ('{"prompt": "123456>"}\n', ["reward.functions=FOLDER/own.py:f"], "No module named 'no_such_module'"),
        ('{"prompt": "123456>"}\n', ["model.path=nobody/no-such-model"], "model.path"),
    ],
    ids=["no prompt field", "reward import", "no model"],
)
def test_bad_input_ends_with_2_and_a_sentence(
    rlsys: Rlsys, tmp_path: Path, rows: str, overrides: list[str], sentence: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(rows)
    (tmp_path / "own.py").write_text("import no_such_module\ndef f(completion): return 1.0\n")
    overrides = [option.replace("FOLDER", str(tmp_path)) for option in overrides]
    command = ["train", "configs/tiny_cpu.yaml", f"run.dir={tmp_path}/run", f"data.train={data}", "eval.datasets=[]"]
    result = rlsys(*command, *LIGHT, "reference.kl_coef=0", *overrides)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_directory_is_refused(rlsys: Rlsys, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    result = rlsys("train", "configs/tiny_cpu.yaml", f"run.dir={tmp_path}/other")
    assert result.returncode == 2
    assert "not a run" in result.stderr
    assert (tmp_path / "other" / "thesis.tex").read_text() == "precious"
