"""With ZeRO 3, no rank ever holds the whole model: peaks of real processes, as the kernel counts them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import pytest
from loading import load_in_ranks, save_model

pytestmark = pytest.mark.long


def test_a_rank_takes_its_share_and_the_largest_tensor_to_load_a_model(tmp_path: Path) -> None:
    save_model(tmp_path, layers=24, hidden=512)
    for peaks in load_in_ranks(str(tmp_path)):
        assert peaks["model"] > 450 << 20
        assert peaks["load"] < peaks["load_bound"] < peaks["model"]
