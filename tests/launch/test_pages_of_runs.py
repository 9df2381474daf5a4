"""Pages say of runs what their records say."""

import json
import sys
from pathlib import Path

import pytest

from rlsys.runs.directory import read_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench/biases"))
import episode_demos
import runs

ROOT = Path(__file__).parents[2]
BIASES = (ROOT / "rlsys/algorithms/BIASES.md").read_text()
RESULTS = read_lines(runs.RESULTS)


def ends(name: str, choice: str, curve: str, at: int = -1) -> list[float]:
    """A curve's value at its end, or at its beginning, by seed."""
    return [r["curves"][curve][at] for r in RESULTS if (r["comparison"], r["choice"]) == (name, choice)]


def test_the_table_of_modes_shows_every_setting_that_was_run() -> None:
    """A choice whose runs do not show what one hoped for stands there too."""
    mine = [r for r in RESULTS if r["comparison"] == "two_modes"]
    assert {r["choice"] for r in mine} <= set(runs.COMPARISONS["two_modes"].choices)
    assert runs.table(mine) in BIASES


@pytest.mark.parametrize("mode_reward", [0.2, 0.5])
def test_degrpo_is_compared_with_grpo_under_the_same_reward_of_a_mode(mode_reward: float) -> None:
    grpo, degrpo = (
        {o.partition("=")[0]: o for o in runs.COMPARISONS["two_modes"].choices[f"{method}, think {mode_reward}"]}
        for method in ("GRPO", "DeGRPO")
    )
    assert grpo["algorithm.control_tokens"] == degrpo["algorithm.control_tokens"]
    assert set(grpo) - set(degrpo) == {"algorithm.advantage", "algorithm.normalize", "algorithm.control_weight"}


def test_lengths_and_digits_end_as_the_page_says() -> None:
    wrong, right = "tokens of wrong answers", "tokens of right answers"
    for choice, curve, grows in [
        ("sequence_mean", wrong, True),
        ("sequence_mean", right, False),
        ("constant", right, True),
    ]:
        first, last = (ends("length", choice, curve, at) for at in (0, -1))
        assert len(first) >= 3
        assert [b > a for a, b in zip(first, last, strict=True)] == [grows] * len(first), (choice, curve)
    assert min(ends("difficulty", "std: none", "share of even digits")) > 0.9
    assert max(ends("difficulty", "std: sample", "share of even digits")) < 0.5


def test_the_page_of_demos_has_the_game_without_a_score_per_guess() -> None:
    page = (ROOT / "configs/README.md").read_text()
    record = [r for r in json.loads(episode_demos.RECORD.read_text()) if r["overrides"] == episode_demos.OUTCOME_ALONE]
    assert record
    for run in record[:1]:
        *middle, last = (f"{100 * share:.0f}" for share in list(run["solved"].values())[1:])
        assert f"{', '.join(middle)} and {last} %" in page
