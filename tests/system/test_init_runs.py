"""What `rlsys init` writes for a machine without GPUs trains, and its processes take the memory that `rlsys plan` says."""

import json
import os
import subprocess
import sys

import pytest
from killing import ROOT

pytestmark = pytest.mark.skipif("RLSYS_LONG" not in os.environ, reason="make memory runs it")

# Of a tiny model's process nearly all is Python and its imports, and that depends on the machine: on a CPU with AMX ranks took 64 MiB
# more than where the estimate was measured; what takes them is not known. A tenth would hide more of a large process.
IMPORT_ROOM = 80 << 20


def test_a_written_configuration_trains_within_the_memory_of_its_plan(rlsys, environment, tmp_path):
    file, figures = tmp_path / "mine.yaml", tmp_path / "figures.json"
    written = rlsys("init", "--model", "builtin:tiny", "--data", "builtin:zigzag", "--gpus", "0", "-o", str(file))
    assert written.returncode == 0, written.stdout + written.stderr
    plan = rlsys("plan", str(file))
    assert plan.returncode == 0, plan.stdout + plan.stderr

    bench = [sys.executable, str(ROOT / "tests" / "bench" / "memory.py"), "--config", str(file), "--case", "tiny"]
    done = subprocess.run(
        [*bench, "--zero", "2", "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    memory = json.loads(figures.read_text())
    assert {"driver", "rollout-0", "rollout-1", "policy-0", "policy-1", "reward-0"} <= {row["worker"] for row in memory}
    far = {
        row["worker"]: row["ratio"]
        for row in memory
        if abs(row["predicted"] - row["total"]) > max(0.1 * row["total"], IMPORT_ROOM)
    }
    assert not far, done.stdout
