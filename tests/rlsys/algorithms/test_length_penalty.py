import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.length_penalty import overlong_penalty, reward_per_token


def test_the_penalty_falls_evenly_over_the_buffer():
    lengths = torch.tensor([0, 1, 12, 13, 14, 15, 16, 17, 99])
    result = overlong_penalty(lengths, longest=16, buffer=4)
    assert result.dtype == torch.float32
    assert result.tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 40), st.data())
def test_the_penalty_equals_the_three_cases_of_the_paper(lengths, longest, data):
    buffer = data.draw(st.integers(1, longest))
    expected = []
    for length in lengths:
        if length <= longest - buffer:
            expected.append(0.0)
        elif length <= longest:
            expected.append(((longest - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    result = overlong_penalty(torch.tensor(lengths, dtype=torch.long), longest=longest, buffer=buffer)
    assert result.tolist() == pytest.approx(expected)


def test_the_longest_completions_lose_the_factor():
    assert overlong_penalty(torch.tensor([4, 6, 8]), longest=8, buffer=4, factor=0.5).tolist() == [0, -0.25, -0.5]
    assert overlong_penalty(torch.tensor([4, 6, 8]), longest=8, buffer=4, factor=0.0).tolist() == [0, 0, 0]


def test_a_buffer_as_long_as_the_longest_counts_from_the_first_token():
    assert overlong_penalty(torch.tensor([0, 1, 4]), longest=4, buffer=4).tolist() == [0, -0.25, -1]


@pytest.mark.parametrize("buffer", [0, -1, 17])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match=rf"^overlong\.penalty: buffer is {buffer}; .*\(16\)"):
        overlong_penalty(torch.tensor([1]), longest=16, buffer=buffer)


def test_a_factor_that_would_reward_length_is_refused():
    with pytest.raises(ValueError, match=r"^overlong\.penalty: factor is -1\.0"):
        overlong_penalty(torch.tensor([1]), longest=16, buffer=4, factor=-1.0)


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 60)), max_size=12))
def test_a_reward_per_token_is_the_reward_over_its_own_length(samples):
    rewards = torch.tensor([r for r, _ in samples], dtype=torch.float32)
    lengths = torch.tensor([length for _, length in samples], dtype=torch.long)
    expected = [reward / (length or 1) for reward, length in samples]
    assert reward_per_token(rewards, lengths).tolist() == pytest.approx(expected)
    both = reward_per_token(torch.stack([rewards, 2 * rewards], 1), lengths)
    assert both[:, 0].tolist() == pytest.approx(expected)
    assert both[:, 1].tolist() == pytest.approx([2 * e for e in expected])
