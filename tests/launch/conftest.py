"""Fixtures for tests of the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import make_model

from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.runs.checkpoint import SUMS, format_sums, sha256

ROOT = Path(__file__).parents[2]
Rlsys = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rlsys(tmp_path: Path) -> Rlsys:
    """`rlsys("validate", …)` runs the command line in an empty directory."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=home,
            env=os.environ | {"COLUMNS": "400", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            timeout=60,
        )

    return run


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A configuration of three short steps."""
    file = tmp_path / "small.yaml"
    file.write_text(
        "trainer: {steps: 3, prompts_per_step: 4, samples_per_prompt: 8, updates_per_step: 2}\n"
        "rollout: {max_new_tokens: 16}\n"
    )
    return file


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 2 and 4, and a half-written one of step 6."""
    run = tmp_path / "run"
    for step in (2, 4):
        make_model(run / "checkpoints" / f"step-{step:06d}" / "model", f"weights {step}")
        folder = run / "checkpoints" / f"step-{step:06d}"
        (folder / "state.json").write_text(json.dumps({"step": step}))
        files = {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}
        (folder / SUMS).write_text(format_sums(files))
    make_model(run / "checkpoints" / ".step-000006" / "model", "weights 6")
    (run / "config.yaml").write_text(loading.to_yaml(Config()))
    (run / "metrics.jsonl").write_text("")
    return run
