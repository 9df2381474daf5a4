"""A reward function that hangs, crashes, lies and leaves threads behind: the run learns, and says what failed and why."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rlsys.run_directory import read_lines

ROOT = Path(__file__).parent.parent.parent


def test_a_run_learns_whatever_its_reward_function_does(tmp_path: Path) -> None:
    words = [
        "configs/tiny_cpu.yaml",
        f"run.dir={tmp_path}/run",
        "trainer.steps=14",
        "eval.every=0",
        "reward.functions=tests/system/traps.py:trap",
        "reward.timeout_s=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "launch", "train", *words],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["step"] == 14
    assert lines[-1]["eval/zigzag/accuracy"] > lines[0]["eval/zigzag/accuracy"] + 0.1
    failed = {reason: sum(line.get(f"failure/{reason}", 0) for line in lines) for reason in REASONS}
    assert all(failed.values()), failed
    assert sum(failed.values()) == sum(line.get("reward/failed", 0) for line in lines)
    told = [e for e in map(json.loads, (tmp_path / "run" / "events.jsonl").open()) if e["event"] == "reward failure"]
    assert {e["reason"] for e in told} == set(REASONS)
    assert any("Traceback" in e["detail"] for e in told)
    assert "a reward verdict failed (timeout): no verdict after 1 s" in done.stdout


REASONS = ("timeout", "crash", "memory", "exception", "invalid")
