"""`compute_grpo_outcome_advantage`, compared with values by hand and with a plain loop."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_advantages import EIGHTHS

from rlsys.algorithms.compat import compute_grpo_outcome_advantage

SAMPLES = st.lists(st.tuples(EIGHTHS, st.integers(0, 5)), min_size=1, max_size=24)
UIDS = ["a"] * 4 + ["b"] * 4


def worked_example(length: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, four responses each, rewards 1 0 1 0 and 0 0 0 1 at the last token."""
    rewards = torch.zeros(8, length)
    rewards[:, -1] = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1])
    return rewards, torch.ones(8, length)


def test_two_groups_by_hand():
    rewards, mask = worked_example()
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    half = 0.5 / (1 / 3) ** 0.5  # 1 0 1 0: mean 1/2, deviation sqrt(1/3)
    expected = [half, -half, half, -half, -0.5, -0.5, -0.5, 1.5]  # 0 0 0 1: mean 1/4, deviation 1/2
    assert advantages.shape == (8, 3)
    for column in advantages.T.tolist():
        assert column == pytest.approx(expected, abs=1e-5)


def test_advantages_are_returned_twice():
    rewards, mask = worked_example()
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert advantages is returns
    assert advantages.abs().sum() > 0


@pytest.mark.parametrize(
    "index",
    [
        UIDS,
        np.array(UIDS, dtype=object),
        np.array([7] * 4 + [3] * 4),
        torch.tensor([7] * 4 + [3] * 4),
        tuple(UIDS),
    ],
    ids=["list", "object array", "int array", "tensor", "tuple"],
)
def test_the_index_may_hold_strings_numbers_or_tensors(index):
    rewards, mask = worked_example()
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert torch.equal(compute_grpo_outcome_advantage(rewards, mask, index)[0], expected)


def test_the_score_is_the_sum_of_the_token_rewards():
    spread = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.5, -0.5]])
    final = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.ones(2, 3)
    assert torch.equal(
        compute_grpo_outcome_advantage(spread, mask, ["a", "a"])[0],
        compute_grpo_outcome_advantage(final, mask, ["a", "a"])[0],
    )


def test_masked_tokens_have_no_advantage():
    rewards, mask = worked_example()
    mask[0, 2] = mask[5, 1:] = 0
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, UIDS)
    assert advantages[0, 2] == 0
    assert advantages[5, 1:].tolist() == [0, 0]
    assert (advantages[mask.bool()] != 0).all()


def test_a_response_alone_keeps_its_own_reward():
    rewards, mask = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0]]), torch.ones(3, 2)
    index = ["alone", "pair", "pair"]
    assert compute_grpo_outcome_advantage(rewards, mask, index)[0][0].tolist() == pytest.approx([3.0, 3.0])
    raw = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)[0]
    assert raw[:, 0].tolist() == [3.0, 0.5, -0.5]


def test_epsilon_is_added_to_the_deviation():
    rewards, mask = torch.tensor([[1.0], [0.0], [2.0]]), torch.ones(3, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "b"], epsilon=1.0)
    deviation = 0.5**0.5
    assert advantages[:, 0].tolist() == pytest.approx([0.5 / (deviation + 1), -0.5 / (deviation + 1), 2.0 / (1 + 1)])


def test_whole_number_token_rewards_have_fractional_advantages():
    rewards, mask = torch.tensor([[0, 1], [0, 0]]), torch.ones(2, 2)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_no_gradient_flows_into_the_rewards():
    rewards, mask = worked_example()
    assert not compute_grpo_outcome_advantage(rewards.requires_grad_(), mask, UIDS)[0].requires_grad


@pytest.mark.parametrize(("shape", "count"), [((2, 4), 2), ((2, 3), 3)])
def test_disagreeing_shapes_are_refused(shape, count):
    with pytest.raises(ValueError, match="do not agree"):
        compute_grpo_outcome_advantage(torch.zeros(2, 3), torch.ones(*shape), ["a"] * count)


def plain_outcome(token_rewards, mask, index, epsilon, norm):
    scores = [sum(row) for row in token_rewards]
    members = defaultdict(list)
    for score, key in zip(scores, index, strict=True):
        members[key].append(score)
    out = []
    for score, key, row in zip(scores, index, mask, strict=True):
        group = members[key]
        mean, deviation = 0.0, 1.0
        if len(group) > 1:
            mean = sum(group) / len(group)
            deviation = math.sqrt(sum((s - mean) ** 2 for s in group) / (len(group) - 1))
        advantage = (score - mean) / (deviation + epsilon) if norm else score - mean
        out.append([advantage * m for m in row])
    return out


@given(SAMPLES, st.booleans(), st.sampled_from([1e-6, 0.1]), st.integers(1, 4))
def test_the_function_equals_a_plain_loop(samples, norm, epsilon, length):
    rng = np.random.default_rng(len(samples))
    rewards = np.zeros((len(samples), length))
    rewards[np.arange(len(samples)), rng.integers(0, length, len(samples))] = [r for r, _ in samples]
    mask = (rng.random((len(samples), length)) < 0.7).astype(float)
    index = [f"uid-{g}" for _, g in samples]
    result, _ = compute_grpo_outcome_advantage(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(mask, dtype=torch.float32),
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm,
    )
    expected = plain_outcome(rewards.tolist(), mask.tolist(), index, epsilon, norm)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-4)
