import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.advantages import ESTIMATORS, compute_grpo_outcome_advantage, grpo

# Eighths are exact in float32, so that equal rewards are equal and different ones far apart.
SAMPLES = st.lists(st.tuples(st.integers(-40, 40).map(lambda n: n / 8), st.integers(0, 5)), min_size=1, max_size=24)


def plain_grpo(rewards: list[float], groups: list[int], std: str, eps: float) -> list[float]:
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = members[group]
        centred = reward - sum(own) / len(own)
        if len(set(own)) == 1:
            out.append(0.0)
        elif std == "none":
            out.append(centred)
        else:
            squares = sum((r - sum(own) / len(own)) ** 2 for r in own)
            out.append(centred / (math.sqrt(squares / (len(own) - (std == "sample"))) + eps))
    return out


def plain_outcome(token_rewards, mask, index, epsilon, norm):
    scores = [sum(row) for row in token_rewards]
    members = defaultdict(list)
    for score, key in zip(scores, index, strict=True):
        members[key].append(score)
    out = []
    for score, key, row in zip(scores, index, mask, strict=True):
        own = members[key]
        mean, deviation = 0.0, 1.0
        if len(own) > 1:
            mean = sum(own) / len(own)
            deviation = math.sqrt(sum((s - mean) ** 2 for s in own) / (len(own) - 1))
        advantage = (score - mean) / (deviation + epsilon) if norm else score - mean
        out.append([advantage * m for m in row])
    return out


@given(SAMPLES, st.sampled_from(["sample", "population", "none"]), st.sampled_from([1e-6, 1e-4, 0.5]))
def test_advantages_equal_a_plain_loop_over_ragged_groups(samples, std, eps):
    rewards, groups = map(list, zip(*samples, strict=True))
    found = grpo(torch.tensor(rewards), torch.tensor(groups), std=std, eps=eps)
    assert found.tolist() == pytest.approx(plain_grpo(rewards, groups, std, eps), abs=1e-4)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples, rng):
    order = list(range(len(samples)))
    rng.shuffle(order)
    rewards, groups = torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples])
    torch.testing.assert_close(grpo(rewards[order], groups[order]), grpo(rewards, groups)[order], atol=1e-4, rtol=0)


@given(SAMPLES, st.integers(-100, 100))
def test_adding_the_same_to_all_rewards_changes_nothing(samples, shift):
    rewards, groups = torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples])
    torch.testing.assert_close(grpo(rewards + shift, groups), grpo(rewards, groups), atol=1e-3, rtol=0)


@given(SAMPLES, st.permutations(range(6)))
def test_group_ids_are_only_names(samples, names):
    rewards, groups = torch.tensor([r for r, _ in samples]), [g for _, g in samples]
    renamed = torch.tensor([1000 * names[g] - 7 for g in groups])
    torch.testing.assert_close(grpo(rewards, renamed), grpo(rewards, torch.tensor(groups)), atol=1e-4, rtol=0)


@given(SAMPLES)
def test_the_advantages_of_a_group_add_up_to_nothing(samples):
    rewards, groups = torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples])
    sums = torch.zeros(6).index_add_(0, groups, grpo(rewards, groups))
    assert sums.abs().max() < 1e-3


def test_one_right_of_two_is_one_deviation_away():
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert grpo(rewards, groups, std="sample", eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert grpo(rewards, groups, std="population", eps=0.0).tolist() == [1.0, -1.0]
    assert grpo(rewards, groups, std="none").tolist() == [0.5, -0.5]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -0.7, 1e8])
def test_a_group_with_equal_rewards_teaches_nothing(std, value):
    assert grpo(torch.full((7,), value), torch.zeros(7, dtype=torch.long), std=std).tolist() == [0.0] * 7


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_a_group_of_one_teaches_nothing(std):
    found = grpo(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([5, 9, 9]), std=std)
    assert found[0] == 0
    assert found[1] > 0 > found[2]


def test_groups_are_found_by_id_and_not_by_position():
    found = grpo(torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([1, 2, 1, 2]), std="none")
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_whole_number_rewards_are_understood():
    assert grpo(torch.tensor([1, 0]), torch.tensor([0, 0]), std="none").tolist() == [0.5, -0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad):
    with pytest.raises(ValueError, match=r"rewards\[1\] is -?(nan|inf)"):
        grpo(torch.tensor([0.0, bad]), torch.tensor([0, 0]))


def test_an_unknown_deviation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="sample, population, none"):
        grpo(torch.tensor([0.0]), torch.tensor([0]), std="unbiased")


def test_rewards_and_groups_of_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"rewards \[2\] and groups \[3\]"):
        grpo(torch.tensor([0.0, 1.0]), torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        grpo(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long))


def test_the_table_holds_what_it_names():
    assert ESTIMATORS["grpo"] is grpo


# --- compute_grpo_outcome_advantage: the function people migrate from -----------------------------------------------------

UIDS = ["a"] * 4 + ["b"] * 4


def worked_example(length: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, four responses each, rewards 1 0 1 0 and 0 0 0 1 at the last token."""
    rewards = torch.zeros(8, length)
    rewards[:, -1] = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1])
    return rewards, torch.ones(8, length)


def test_the_worked_example_comes_out():
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
def test_the_index_may_be_of_any_kind(index):
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


@given(SAMPLES, st.booleans(), st.sampled_from([1e-6, 0.1]), st.integers(1, 4))
def test_the_function_equals_a_plain_loop(samples, norm, epsilon, length):
    rng = np.random.default_rng(len(samples))
    rewards = np.zeros((len(samples), length))
    rewards[np.arange(len(samples)), rng.integers(0, length, len(samples))] = [r for r, _ in samples]
    mask = (rng.random((len(samples), length)) < 0.7).astype(float)
    index = [f"uid-{g}" for _, g in samples]
    found, _ = compute_grpo_outcome_advantage(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(mask, dtype=torch.float32),
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm,
    )
    expected = plain_outcome(rewards.tolist(), mask.tolist(), index, epsilon, norm)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
