"""The long run with kills, made short."""

import os
from pathlib import Path

import pytest
import soak
from killing import apart

pytestmark = pytest.mark.skipif("RLSYS_LONG" not in os.environ, reason="make soak runs it")


def test_a_run_whose_processes_are_killed_again_and_again_finishes_and_leaves_nothing(tmp_path: Path) -> None:
    with apart() as place:
        outcome = soak.soak(tmp_path / "run", place, steps=40, every=12, until=40, seed=2)
    assert (outcome["exit"], outcome["done"]) == (0, 40), outcome["words"]
    assert outcome["kills"] == 3
    assert outcome["left"] == []
    assert outcome["growth_mib_per_100_steps"] == []  # nothing lives long enough
    shorter = outcome["shorter_than_700_steps"]
    assert {*soak.WORKERS, "command", "driver", "gcs_server", "raylet"} <= shorter.keys()
    assert shorter["command"]["processes"] == 1
    assert shorter["command"]["longest"] >= 35
    assert outcome["accuracy"][40] > outcome["accuracy"][0] + 0.2
