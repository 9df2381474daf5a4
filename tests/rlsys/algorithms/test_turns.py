"""Advantages of turns, against values computed by hand and by a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.credit import CreditAssignment
from rlsys.errors import ConfigError
from rlsys.types import Batch, Columns, Episode, Observation


def played(batch: Batch, turns: list[list[tuple[int, float]]]) -> Batch:
    """The batch with turns of so many tokens, each with its score."""
    samples = []
    for sample, of_sample in zip(batch.samples, turns, strict=True):
        starts = np.cumsum([0, *(tokens for tokens, _ in of_sample)])[:-1]
        openings = tuple(Observation(int(at), np.array([1], dtype=np.int32)) for at in starts)
        samples.append(
            replace(sample, observations=openings, episode=Episode(None, [], [score for _, score in of_sample]))
        )
    return replace(batch, samples=samples)


def assign(tmp_path, batch: Batch, *overrides: str) -> list[float]:
    config = make_config(tmp_path, "algorithm.credit=turn", *overrides)
    return CreditAssignment(config)(1, batch, Columns(), 0.0).columns.advantages.tolist()


def test_a_turn_is_compared_by_what_came_after_it_with_the_same_turn_of_others(tmp_path):
    """Rewards 2.5 (of which 0.5 in the first turn, 1 in the last) and 1 (all in its second and last turn)."""
    batch = played(
        make_batch([2.5, 1.0], [0, 0], lengths=[4, 3]), [[(1, 0.5), (2, 0.0), (1, 1.0)], [(2, 0.0), (1, 1.0)]]
    )
    # Returns 2.5, 2, 2 and 1, 1. First turns: 2.5 and 1; second: 2 and 1; the third is alone.
    assert assign(tmp_path, batch, "algorithm.advantage=dr_grpo") == [0.75, 0.5, 0.5, 0.0, -0.75, -0.75, -0.5]


def test_single_answers_and_episodes_that_score_no_turn_are_compared_as_ever(tmp_path):
    batch = make_batch([1.0, 0.0, 2.0], [0, 0, 0], lengths=[2, 2, 3])
    whole = CreditAssignment(make_config(tmp_path))(1, batch, Columns(), 0.0).columns.advantages.tolist()
    assert assign(tmp_path, batch) == whole
    assert assign(tmp_path, played(batch, [[(1, 0.0), (1, 0.0)], [(1, 0.0), (1, 0.0)], [(2, 0.0), (1, 0.0)]])) == whole


@settings(derandomize=True, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.tuples(st.integers(1, 3), st.integers(-2, 2).map(float)), min_size=1, max_size=4),
            st.integers(-2, 2).map(float),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_plain_loop_over_turns_gives_the_same(tmp_path_factory, episodes):
    episodes = sorted(episodes, key=lambda e: e[0])
    rewards = [end + sum(score for _, score in turns) for _, turns, end in episodes]
    batch = make_batch(
        rewards, [group for group, _, _ in episodes], lengths=[sum(n for n, _ in t) for _, t, _ in episodes]
    )
    batch = played(batch, [turns for _, turns, _ in episodes])
    returns = [[end + sum(s for _, s in turns[k:]) for k in range(len(turns))] for _, turns, end in episodes]
    expected = []
    for i, (group, turns, _) in enumerate(episodes):
        for k, (tokens, _) in enumerate(turns):
            peers = [r[k] for (g, _, _), r in zip(episodes, returns, strict=True) if g == group and len(r) > k]
            expected += [returns[i][k] - sum(peers) / len(peers)] * tokens
    folder = tmp_path_factory.mktemp("turns")
    assert assign(folder, batch, "algorithm.advantage=dr_grpo") == pytest.approx(expected, abs=1e-5)


def test_shuffled_rewards_tell_nothing_through_the_scores_of_turns(tmp_path):
    batch = played(make_batch([1.0, 1.0], [0, 0], lengths=[2, 2]), [[(1, 1.0), (1, 0.0)], [(1, 0.0), (1, 1.0)]])
    assert assign(tmp_path, batch, "reward.shuffle=true") == [0.0] * 4


@pytest.mark.parametrize("option", ["algorithm.advantage=remax", "reward.per_token=true"])
def test_methods_that_compare_no_turns_are_refused(tmp_path, option):
    with pytest.raises(ConfigError, match=r"algorithm\.credit turn compares turns with each other"):
        make_config(tmp_path, "algorithm.credit=turn", option)
