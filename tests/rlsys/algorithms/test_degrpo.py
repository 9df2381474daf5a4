"""DeGRPO against the formulas of its paper, arXiv 2505.13379: the mode reward, and the loss of a whole mini-batch."""

import math

import plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.advantages import dr_grpo
from rlsys.algorithms.losses import ppo_clip
from rlsys.algorithms.modes import mode_rewards
from rlsys.batching.packing import token_weights

GAMMA, ALPHA = 0.25, 0.125
SHORT, THINK = "<short>", "<think>"
SAMPLES = st.tuples(st.sampled_from([SHORT, THINK]), st.booleans(), st.integers(1, 6))


def paper_reward(mode: str, right: bool) -> float:
    if mode == SHORT and right:
        return 1.0
    if mode == THINK and right:
        return 1.0 - GAMMA
    return -1.0


def ours(samples: list[tuple[str, bool, int]]) -> torch.Tensor:
    right = torch.tensor([{SHORT: 1.0, THINK: 1.0 - GAMMA}[mode] for mode, _, _ in samples])
    return mode_rewards(torch.tensor([float(score) for _, score, _ in samples]), right)


@given(st.lists(SAMPLES, min_size=1, max_size=8))
def test_the_reward_of_a_mode_is_the_papers(samples):
    assert ours(samples).tolist() == [paper_reward(mode, right) for mode, right, _ in samples]


def test_a_score_between_right_and_wrong_is_worth_as_much_between_their_rewards():
    assert mode_rewards(torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.5])).tolist() == [0.0, -0.625]


def test_an_answer_that_begins_with_no_control_token_is_wrong():
    assert mode_rewards(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, -1.0])).tolist() == [-1, -1]


@given(st.lists(SAMPLES, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_loss_of_a_group_is_the_papers_double_sum(samples, rng):
    """1/G Σ_i (α L_i0 + 1/T_i Σ_t L_it), L_it = -min(r A, clip(r) A), A = r_i - mean; T_i without the control token."""
    rewards = [paper_reward(mode, right) for mode, right, _ in samples]
    lengths = [1 + rest for _, _, rest in samples]
    old = [[rng.uniform(-3, 0) for _ in range(n)] for n in lengths]
    new = [[p + rng.uniform(-0.5, 0.5) for p in row] for row in old]
    expected = 0.0
    for reward, new_row, old_row in zip(rewards, new, old, strict=True):
        advantage = reward - math.fsum(rewards) / len(rewards)
        losses = []
        for logprob, before in zip(new_row, old_row, strict=True):
            ratio = math.exp(logprob - before)
            losses.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
        expected += (ALPHA * losses[0] + math.fsum(losses[1:]) / len(losses[1:])) / len(rewards)

    groups = torch.zeros(len(samples), dtype=torch.long)
    counts = torch.tensor(lengths)
    advantages = dr_grpo(ours(samples), groups).repeat_interleave(counts)
    flat = [torch.tensor([p for row in rows for p in row]) for rows in (new, old)]
    losses = ppo_clip(*flat, advantages, torch.arange(len(samples)).repeat_interleave(counts))
    total = (losses * token_weights(counts, "decoupled", control_weight=ALPHA)).sum()
    assert total.item() == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8))
def test_only_a_control_token_is_weighed_apart(sequences):
    lengths, starts = [n for n, _ in sequences], [start for _, start in sequences]
    actual = token_weights(torch.tensor(lengths), "decoupled", torch.tensor(starts), control_weight=ALPHA)
    expected = plain.token_weights(lengths, "decoupled", control_weight=ALPHA, starts=starts)
    assert actual.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_other_weightings_do_not_look_at_control_tokens(normalize):
    lengths = torch.tensor([3, 1])
    weights = [token_weights(lengths, normalize, starts, constant=5) for starts in (None, torch.tensor([True, False]))]
    assert torch.equal(*weights)
