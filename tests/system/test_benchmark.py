"""`rlsys bench` on the demo's configuration: all of it, as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import LIGHT, ROOT, apart

LONG = pytest.mark.skipif("RLSYS_LONG" not in os.environ, reason="make bench runs it")


def test_a_benchmark_tells_where_the_time_goes_and_leaves_only_what_was_asked_for(
    rlsys: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    options = [
        "--steps",
        "2",
        "--prompt-tokens",
        "20",
        "--ragged",
        "8,24",
        "--json",
        str(figures),
        "--trace",
        str(trace),
    ]
    small = ["trainer.prompts_per_step=4", "trainer.samples_per_prompt=4", "reference.kl_coef=0", *LIGHT]
    result = rlsys("bench", "configs/tiny_cpu.yaml", *small, *options)
    assert result.returncode == 0, result.stderr
    assert "not in rollout, score, update or sync" in result.stdout
    assert "32 of 32 samples trained" in result.stdout

    report = json.loads(figures.read_text())
    assert len(report["step_s"]) == 2
    assert report["trained_samples"] == report["samples"] == 32
    assert sum(report["phases_s"].values()) == pytest.approx(sum(report["step_s"]) / 2, abs=1e-3)
    assert report["samples_per_s"] * sum(report["step_s"]) == pytest.approx(2 * 16)
    lengths = report["generated_tokens_per_s"] / report["samples_per_s"]
    assert 4 < lengths < 16, "ragged, 8 on average"
    assert 0 < report["flop_use"]["step"] < 1
    assert report["sync"]["bytes"] == 4 * 330_752
    assert {name.partition("-")[0] for name in report["idle_share"]} == {"rollout", "policy", "reward"}
    assert all(0 < share < 1 for share in report["idle_share"].values())

    drawn = json.loads(trace.read_text())["traceEvents"]
    whole = [e for e in drawn if e["ph"] == "X"]
    assert {"step", "rollout", "generate", "update", "send", "take", "judge"} <= {e["name"] for e in whole}
    samples = [e["args"]["tokens"] for e in whole if e["name"].startswith("bench:")]
    assert len(samples) >= 3 * 16
    assert 1 <= min(samples) < max(samples) <= 24
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures.json", "trace.json"]


@LONG
def test_a_bench_whose_own_reward_is_0_everywhere_is_refused_and_writes_no_figures(
    rlsys: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    reward, figures = tmp_path / "nothing.py", tmp_path / "figures.json"
    reward.write_text("def nothing(completion):\n    return 0.0\n")
    settings = [
        f"reward.functions={{{reward}:nothing: 1.0}}",
        "trainer.prompts_per_step=2",
        "reference.kl_coef=0",
        *LIGHT,
    ]
    options = ["--rewards", "--steps", "1", "--warmup", "0", "--prompt-tokens", "8", "--completion-tokens", "8"]
    result = rlsys("bench", "configs/tiny_cpu.yaml", *settings, *options, "--json", str(figures))
    assert result.returncode == 2, result.stderr
    assert "samples trained" in result.stdout, "the table is printed nevertheless"
    assert "of a part of an update" in result.stderr
    assert "Without --rewards" in result.stderr
    assert not figures.exists()


@LONG
def test_the_table_of_gpus_trains_all_samples_of_a_model_whose_tokens_have_words(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    program = "import sys; import table; table.stamp = lambda: 'abc1234:0123456'; table.main()"
    small = ["trainer.prompts_per_step=2", "trainer.samples_per_prompt=2", *LIGHT]
    options = ["--device=cpu", "--models=tiny", "--steps=1", "--tokens=8", "--json", str(out), *small]
    command = [sys.executable, "-c", program, *options]
    with apart() as place:
        environment = place.environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'gpu'}"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    [row] = json.loads(out.read_text())["rows"]
    assert row["figures"]["trained_samples"] >= 0.9 * row["figures"]["samples"] > 0
