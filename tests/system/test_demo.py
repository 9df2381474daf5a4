"""The demonstration keeps its promise: GRPO learns from the verifier, and from nothing else."""

import subprocess
import sys
import time
from pathlib import Path

from rlsys.run_directory import read_lines

ROOT = Path(__file__).parent.parent.parent


def accuracies(run: Path, *overrides: str) -> list[float]:
    command = [sys.executable, "-m", "launch", "train", "configs/tiny_cpu.yaml", f"run.dir={run}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        line["eval/zigzag/accuracy"] for line in read_lines(run / "metrics.jsonl") if "eval/zigzag/accuracy" in line
    ]


def test_the_demo_learns(tmp_path: Path) -> None:
    began = time.monotonic()
    found = accuracies(tmp_path / "run")
    assert found[0] <= 0.5
    assert found[-1] >= 0.95
    assert time.monotonic() - began < 400, "twice the promised time, on a machine that may be busy"


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    found = accuracies(tmp_path / "run", "reward.shuffle=true", "trainer.steps=20")
    assert max(found[1:]) <= found[0] + 0.1
