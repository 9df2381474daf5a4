from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.analysis.rescoring import MAX_SHOWN, Disagreements, RewardComparison, compare_rewards
from rlsys.runs.samples import SavedSample
from rlsys.types import Prompt, Sample, Verdict

NOTHING = np.array([], dtype=np.int32), np.array([], dtype=np.float32)
REWARDS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([-1.0, 0.0, 2.0])), min_size=1, max_size=9
)


def saved(uid: str, score: float | None, text: str = "", advantage: float | None = 0.0) -> SavedSample:
    prompt, sample = Prompt(uid, "s", uid, [], {}), Sample(uid, 0, text, *NOTHING, "stop", 1)
    return SavedSample(prompt, sample, Verdict(score, {}, "timeout" if score is None else ""), advantage)


def compare(*groups: list[tuple[float | None, float | None]]) -> RewardComparison:
    """Compares groups, each given as old and new rewards of its samples."""
    pairs = [
        (saved(f"p{g}", old), Verdict(new, {}, "crash" if new is None else ""))
        for g, own in enumerate(groups)
        for old, new in own
    ]
    return compare_rewards([s for s, _ in pairs], [v for _, v in pairs])


def test_equal_rewards_change_nothing():
    comparison = compare([(1, 1), (0, 0)], [(1, 1), (1, 1)])
    assert (
        comparison.samples,
        comparison.judged,
        comparison.changed,
        comparison.flipped,
        comparison.start_teaching,
        comparison.stop_teaching,
    ) == (
        4,
        4,
        0,
        0,
        0,
        0,
    )
    assert (comparison.groups, comparison.taught_before, comparison.teach_now) == (2, 1, 1)
    assert comparison.correlation == pytest.approx(1)


def test_sums_and_changes_count_samples_that_both_judged():
    comparison = compare([(1, 0.5), (0, 0.5), (None, 1), (0.25, None)])
    assert (comparison.samples, comparison.judged, comparison.changed) == (4, 2, 2)
    assert (comparison.old_sum / comparison.judged, comparison.new_sum / comparison.judged) == (0.5, 0.5)
    assert comparison.failures == {"crash": 1}
    assert comparison.recovered == 1


def test_groups_start_and_stop_teaching():
    comparison = compare([(1, 1), (1, 0)], [(1, 1), (0, 1)], [(0, 0), (0, 0)], [(1, 0), (0, 1)])
    assert (
        comparison.groups,
        comparison.taught_before,
        comparison.teach_now,
        comparison.start_teaching,
        comparison.stop_teaching,
    ) == (
        4,
        2,
        2,
        1,
        1,
    )


def test_an_advantage_flips_when_the_reward_crosses_its_groups_mean():
    assert compare([(1, 0), (0, 1)]).flipped == 2
    assert compare([(1, 5), (0, 3)]).flipped == 0, "another scale is the same order"
    assert compare([(1, 1), (0, 1)]).flipped == 0, "on the mean is on no side"
    assert compare([(1, 0)], [(0, 1)]).flipped == 0, "a sample alone has no advantage"


def test_samples_of_an_evaluation_have_no_advantages_to_flip():
    comparison = compare_rewards(
        [saved("p", 1, advantage=None), saved("p", 0, advantage=None)], [Verdict(0), Verdict(1)]
    )
    assert (comparison.judged, comparison.changed, comparison.groups, comparison.flipped) == (2, 2, 0, 0)


@given(REWARDS)
def test_the_correlation_is_numpys(pairs):
    old, new = np.array(pairs).T
    correlation = compare(pairs).correlation
    if np.ptp(old) and np.ptp(new):
        assert correlation == pytest.approx(np.corrcoef(old, new)[0, 1])
    else:
        assert correlation is None


@given(REWARDS, REWARDS)
def test_comparisons_add_up(one, two):
    together = vars(compare(one, two))
    for name, value in vars(compare(one) + compare(two)).items():
        assert value == pytest.approx(together[name]), name


def test_the_largest_disagreements_are_kept_and_a_text_is_shown_once():
    disagreements = Disagreements()
    gaps = [0.5, 3.0, 0.0, 2.0, 1.0, 2.5, 0.25, 3.0]
    for gap in gaps:
        disagreements.add(Path("step-000001.parquet"), saved("p", 1.0, text=f"{gap}"), Verdict(1.0 - gap))
    disagreements.add(Path("x"), saved("p", None), Verdict(9.0))
    disagreements.add(Path("x"), saved("p", 1.0), Verdict(None, failure="crash"))
    kept_gaps = [1.0 - verdict.score for _, _, verdict in disagreements.largest_first()]
    assert kept_gaps == [3.0, 2.5, 2.0, 1.0, 0.5]
    assert len(kept_gaps) == MAX_SHOWN
