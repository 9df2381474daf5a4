"""The long run with kills, made short."""

from pathlib import Path

import soak
from killing import apart


def test_a_run_whose_processes_are_killed_again_and_again_finishes_and_leaves_nothing(tmp_path: Path) -> None:
    with apart() as place:
        found = soak.soak(tmp_path / "run", place, steps=40, every=12, seed=2)
    assert (found["exit"], found["done"]) == (0, 40), found["words"]
    assert found["kills"] == 3
    assert found["left"] == []
    assert found["accuracy"][40] > found["accuracy"][0] + 0.2
