import math

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_columns import draw_columns

from rlsys.algorithms.gae import gae, whiten

SHARES = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def tensors(columns: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rewards, values = (torch.tensor(c, dtype=torch.float32) for c in columns[:2])
    return rewards, values, torch.tensor(columns[4], dtype=torch.long)


@settings(max_examples=60)
@given(draw_columns(), SHARES, SHARES)
def test_advantages_and_returns_equal_the_recursion_from_each_end(columns, gamma, lam):
    result = gae(*tensors(columns), gamma=gamma, lam=lam)
    expected = plain.gae(columns[0], columns[1], columns[4], gamma=gamma, lam=lam)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.tolist() == pytest.approx(theirs, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.999, 0.97)])
def test_long_sequences_beside_short_ones_equal_the_recursion(gamma, lam):
    """3000 tokens, which is not a power of two, between sequences of one token."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.tensor([3] + [-1] * 3000 + [7] + [2] * 513)
    rewards, values = (torch.randn(len(sequences), generator=generator) for _ in range(2))
    result = gae(rewards, values, sequences, gamma=gamma, lam=lam)
    expected = plain.gae(rewards.tolist(), values.tolist(), sequences.tolist(), gamma=gamma, lam=lam)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.tolist() == pytest.approx(theirs, rel=1e-4, abs=1e-3)


def test_three_tokens_by_hand():
    """A reward of 1 at the end. With γ = 1, δ = 0.75 - 0.5, 0.25 - 0.75, 1 - 0.25; later δ count by halves."""
    rewards, values, sequences = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.75, 0.25]), torch.zeros(3).long()
    advantages, returns = gae(rewards, values, sequences, lam=0.5)
    assert advantages.tolist() == [0.25 - 0.125 / 2, -0.5 + 0.75 / 2, 0.75]
    assert returns.tolist() == (advantages + values).tolist()


def test_without_discount_it_is_the_sum_of_later_rewards_minus_the_value():
    rewards, values = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    advantages, returns = gae(rewards, values, torch.tensor([0, 0, 0, 1]))
    assert returns.tolist() == [7, 6, 4, 8]
    assert advantages.tolist() == [6.5, 5.5, 3.5, 7.5]


def test_with_lambda_0_only_the_next_value_counts():
    rewards, values = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.25, 0.125])
    assert gae(rewards, values, torch.tensor([0, 0, 0]), lam=0.0)[0].tolist() == [0.75, 1.875, 3.875]
    assert gae(rewards, values, torch.tensor([0, 0, 0]), gamma=0.0)[0].tolist() == [0.5, 1.75, 3.875]


def test_a_truncated_sequence_may_go_on_with_its_last_value():
    """γ = 0.5, λ = 1. The first ends: δ = 0 + 1 - 4, 1 + 0 - 2. The second goes on: δ = 0 + 1 - 4, 1 + 1 - 2."""
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([4.0, 2.0, 4.0, 2.0])
    bootstrap = torch.tensor([False, False, False, True])
    advantages, returns = gae(rewards, values, torch.tensor([0, 0, 1, 1]), gamma=0.5, bootstrap=bootstrap)
    assert advantages.tolist() == [-3.5, -1, -3, 0]
    assert returns.tolist() == [0.5, 1, 1, 2]


def test_a_perfect_critic_leaves_no_advantage():
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0])
    assert gae(rewards, values, torch.tensor([4, 4, 4, 2, 2]), lam=0.7)[0].tolist() == [0] * 5


@given(draw_columns(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(columns, rng):
    blocks = plain.members(columns[4])
    rng.shuffle(blocks)
    order = [t for block in blocks for t in block]
    moved = gae(*tensors([[c[t] for t in order] for c in columns]), gamma=0.9, lam=0.9)
    for ours, other in zip(gae(*tensors(columns), gamma=0.9, lam=0.9), moved, strict=True):
        torch.testing.assert_close(other, ours[order])


def test_half_precision_is_computed_in_full_precision():
    rewards, values = torch.linspace(-1, 1, 9).bfloat16(), torch.linspace(0.3, -0.2, 9).bfloat16()
    sequences = torch.tensor([5, 5, 5, 1, -2, -2, -2, -2, 9])
    for ours, upcast in zip(
        gae(rewards, values, sequences), gae(rewards.float(), values.float(), sequences), strict=True
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, upcast)


def test_no_gradient_flows_into_the_critic():
    values = torch.tensor([0.5], requires_grad=True)
    assert not any(t.requires_grad for t in gae(torch.ones(1), values, torch.tensor([0])))


def test_no_tokens_have_no_advantages():
    assert [t.shape for t in gae(torch.zeros(0), torch.zeros(0), torch.zeros(0).long())] == [(0,), (0,)]


PAIR = torch.zeros(2).long()


@pytest.mark.parametrize(
    ("rewards", "values", "options", "message"),
    [
        (torch.zeros(3), torch.zeros(2), {}, r"are \[3\], \[2\], \[2\]; each must be \[T\]"),
        (torch.tensor([0.0, math.nan]), torch.zeros(2), {}, r"rewards\[1\] is nan"),
        (torch.zeros(2), torch.tensor([-math.inf, 0.0]), {}, r"values\[0\] is -inf"),
        (torch.zeros(2), torch.zeros(2), {"gamma": 1.1}, "gamma is 1.1"),
        (torch.zeros(2), torch.zeros(2), {"gamma": math.nan}, "gamma is nan"),
        (torch.zeros(2), torch.zeros(2), {"lam": -0.1}, "lam is -0.1"),
    ],
)
def test_wrong_inputs_are_refused_with_their_value(rewards, values, options, message):
    with pytest.raises(ValueError, match=f"^gae: .*{message}"):
        gae(rewards, values, PAIR, **options)


# --- whiten -----------------------------------------------------------------------------------------------------------


def test_whitened_values_have_mean_0_and_deviation_1():
    result = whiten(torch.tensor([1.0, 2.0, 3.0, 10.0]))
    assert result.mean().item() == pytest.approx(0, abs=1e-6)
    assert result.std().item() == pytest.approx(1, rel=1e-5)
    assert whiten(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=12), st.integers(-9, 9), st.sampled_from([0.5, 3.0]))
def test_whitening_removes_shift_and_scale(values, shift, scale):
    values = torch.tensor(values, dtype=torch.float32)
    torch.testing.assert_close(whiten(values * scale + shift), whiten(values), atol=1e-4, rtol=1e-4)


def test_a_single_value_is_whitened_to_0():
    assert whiten(torch.tensor([3.0])).tolist() == [0]
    assert whiten(torch.zeros(0)).tolist() == []


def test_equal_values_are_whitened_to_0_where_their_mean_is_exact():
    assert whiten(torch.full((8,), 0.25)).tolist() == [0] * 8


def test_equal_values_are_whitened_to_0_where_their_mean_is_not_exact():
    assert whiten(torch.full((7,), 0.1)).abs().max() < 1e-3
