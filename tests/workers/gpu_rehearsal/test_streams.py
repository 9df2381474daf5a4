"""DeepSpeed's code for devices with streams, over Gloo: every ZeRO stage makes the update that torch alone makes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
from streamed_update import CASES, UPDATES, Case, build_model, run_plainly

from workers.start.ports import free_port

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent.parent / "rlsys", HERE.parent.parent.parent]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What rank 0 of two prints for each case."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    command, port = [sys.executable, str(HERE / "fake_streams.py")], str(free_port())
    ranks = [
        subprocess.Popen([*command, str(rank), "2", port], env=environment, stdout=pipe, stderr=pipe, text=True)
        for rank, pipe in ((0, PIPE), (1, DEVNULL))
    ]
    try:
        output, errors = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lines = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE")]
    assert len(lines) == len(CASES), errors[-3000:]
    return lines


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run_plainly()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_stage_makes_the_update_that_torch_makes(
    results: list[dict[str, Any]], plain: dict[str, Any], case: Case
) -> None:
    result = results[CASES.index(case)]
    if case.nan:
        untouched = sum(float(p.detach().double().abs().sum()) for p in build_model(case).parameters())
        assert result["skipped"] == [1.0] * UPDATES
        assert result["weights"] == pytest.approx(untouched, rel=1e-9)
        assert result["step"] == 0
        return
    tolerance = 1e-4 if case.dtype == "float32" else 0.03
    assert result["skipped"] == [0.0] * UPDATES
    assert result["norms"] == pytest.approx(plain["norms"], rel=tolerance)
    assert result["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-3 if case.dtype == "float32" else 0.1)
    assert result["weights"] == pytest.approx(plain["weights"], rel=1e-4)  # two updates change it by 3e-3
    assert result["step"] == UPDATES
