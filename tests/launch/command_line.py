"""What tests of the command line share beside the fixtures."""

import json
import subprocess
from pathlib import Path


def problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The sentences on standard error."""
    return [line.removeprefix("✗ ") for line in done.stderr.splitlines() if line.startswith("✗ ")]


def make_model(folder: Path, weights: str) -> Path:
    """A model directory that only looks like one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_text(weights)
    return folder
