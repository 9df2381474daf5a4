"""The expected gradient of each estimator, compared with the true gradient.

A prompt is a choice between a right answer (reward 1) and a wrong one (0), with one logit θ: right with probability
p = σ(θ). d log π / dθ is 1 - p for the right answer and -p for the wrong one; the gradient of the mean success p is
p (1 - p). An estimator's gradient is the mean over a group of G of advantage · d log π / dθ. Its expectation is
computed twice: by summing over the number of right answers in a group, which is binomial, and by drawing groups.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fakes import make_batch, make_config
from torch import Tensor

from rlsys.algorithms.advantages import ESTIMATORS
from rlsys.algorithms.credit import CreditAssignment
from rlsys.algorithms.losses import LOSSES
from rlsys.batching.packing import token_weights
from rlsys.types import Columns

Estimate = Callable[[Tensor, Tensor], Tensor]  # rewards [N], groups [N] -> advantages [N]

PROBABILITIES = [0.02, 0.3, 0.5, 0.9]


def success_gradient(p: float) -> float:
    return p * (1 - p)


def estimator(name: str, **options: object) -> Estimate:
    def estimate(rewards: Tensor, groups: Tensor) -> Tensor:
        if name == "remax":
            return ESTIMATORS[name](rewards, groups, greedy=torch.ones(len(rewards)))
        return ESTIMATORS[name](rewards, groups, lengths=torch.full((len(rewards),), 3), **options)

    return estimate


def expected_gradient(estimate: Estimate, p: float, size: int) -> float:
    """The estimator's mean gradient over 0, 1, … G right answers of G, each weighted by its probability."""
    right = torch.arange(size + 1)
    rewards = (torch.arange(size) < right[:, None]).float()  # [G+1, G]
    advantages = estimate(rewards.flatten(), right.repeat_interleave(size)).view_as(rewards).double()
    gradients = (advantages * (rewards.double() - p)).mean(1)
    chances = [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]
    return (torch.tensor(chances, dtype=torch.float64) * gradients).sum().item()


def sampled_gradient(estimate: Estimate, p: float, size: int, draws: int = 20_000) -> tuple[float, float]:
    """The mean gradient of drawn groups, and its standard error."""
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(draws, size, generator=generator) < p).float()
    advantages = estimate(rewards.flatten(), torch.arange(draws).repeat_interleave(size)).view_as(rewards).double()
    gradients = (advantages * (rewards.double() - p)).mean(1)
    return gradients.mean().item(), gradients.std().item() / draws**0.5


def assert_expected_gradient(estimate: Estimate, p: float, size: int, right: float) -> None:
    """The sum is close to the right value, and the draws are within four standard errors of it."""
    assert expected_gradient(estimate, p, size) == pytest.approx(right, rel=1e-4, abs=1e-8)
    mean, error = sampled_gradient(estimate, p, size)
    assert abs(mean - right) < 4 * error + 1e-6  # rare outcomes may not have been drawn


# --- unbiased ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("name", ["raw", "rloo", "remax"])
def test_a_baseline_independent_of_the_sample_leaves_the_gradient_unbiased(name, p):
    for size in (2, 8):
        assert_expected_gradient(estimator(name), p, size, success_gradient(p))


def test_a_baseline_removes_the_noise_of_rewards_far_from_zero():
    def far(name: str) -> Estimate:
        return lambda rewards, groups: ESTIMATORS[name](rewards + 10, groups)

    for name in ("raw", "rloo"):
        assert_expected_gradient(far(name), 0.3, 8, success_gradient(0.3))
    assert sampled_gradient(far("raw"), 0.3, 8)[1] > 20 * sampled_gradient(far("rloo"), 0.3, 8)[1]


# --- a constant factor for every prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("name", ["dr_grpo", "opo"])
def test_a_mean_with_the_sample_itself_shrinks_every_gradient(name, p):
    """With completions of equal length, the baseline of opo is the plain mean."""
    for size in (2, 8):
        assert_expected_gradient(estimator(name), p, size, (size - 1) / size * success_gradient(p))


@pytest.mark.parametrize("wrong_length", [1, 9])
def test_opo_is_biased_where_the_length_tells_right_from_wrong(wrong_length):
    """Right answers have 3 tokens. With K right ones, b = 3 K / (3 K + l (G - K)).

    E[gradient] = truth - E[b Σ score / G].
    """
    p, size = 0.3, 4

    def estimate(rewards: Tensor, groups: Tensor) -> Tensor:
        lengths = torch.where(rewards > 0, 3, wrong_length)
        return ESTIMATORS["opo"](rewards, groups, lengths=lengths)

    lost = 0.0
    for k in range(size + 1):
        baseline = 3 * k / (3 * k + wrong_length * (size - k))
        lost += math.comb(size, k) * p**k * (1 - p) ** (size - k) * baseline * (k - size * p) / size
    assert_expected_gradient(estimate, p, size, success_gradient(p) - lost)
    shrunk = (size - 1) / size * success_gradient(p)
    assert (success_gradient(p) - lost > shrunk) == (
        wrong_length > 3
    )  # long wrong answers lower the baseline, which then removes less


# --- GRPO weighs by difficulty ----------------------------------------------------------------------------------------


def grpo_gradient(p: float, size: int, std: str) -> float:
    """Σ_K binomial(K) · k (1 - k) / deviation(K) with k = K/G.

    The population deviation is sqrt(k (1 - k)); the sample deviation is that · sqrt(G/(G-1)).
    """
    total = 0.0
    for right in range(1, size):
        k = right / size
        deviation = math.sqrt(k * (1 - k) * (size / (size - 1) if std == "sample" else 1))
        total += math.comb(size, right) * p**right * (1 - p) ** (size - right) * k * (1 - k) / deviation
    return total


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_dividing_by_the_deviation_gives_the_binomial_gradient(p, std):
    for size in (2, 8):
        assert_expected_gradient(estimator("grpo", std=std), p, size, grpo_gradient(p, size, std))


def test_dividing_by_the_deviation_favors_very_easy_and_very_hard_prompts():
    """The ratio to the true gradient grows towards both ends, equally."""
    estimate = estimator("grpo")
    ratios = {
        p: expected_gradient(estimate, p, 8) / success_gradient(p) for p in (0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
    }
    assert ratios[0.01] > ratios[0.05] > ratios[0.2] > ratios[0.5]
    for p in (0.01, 0.05, 0.2):
        assert ratios[p] == pytest.approx(ratios[1 - p], rel=1e-3)
    assert ratios[0.01] > 1.3 * ratios[0.5]
    flat = {p: expected_gradient(estimator("dr_grpo"), p, 8) / success_gradient(p) for p in ratios}
    assert max(flat.values()) == pytest.approx(min(flat.values()), rel=1e-4)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_in_large_groups_grpo_weights_a_prompt_by_one_over_its_deviation(p):
    assert expected_gradient(estimator("grpo"), p, 512) == pytest.approx(
        success_gradient(p) / success_gradient(p) ** 0.5, rel=0.02
    )


@pytest.mark.parametrize("size", [2, 8])
def test_the_weight_of_the_hardest_prompts_is_bounded_by_the_group_size(size):
    """One right answer in G has the smallest deviation: as p goes to 0, the ratio goes to sqrt(G - 1)."""
    p = 1e-6
    assert expected_gradient(estimator("grpo", std="population"), p, size) / success_gradient(p) == pytest.approx(
        (size - 1) ** 0.5, rel=1e-3
    )


# --- deviations of the whole batch ------------------------------------------------------------------------------------


def one_sample_each(estimate: Estimate, chances: list[float]) -> list[float]:
    """The expected gradient of each prompt's logit, over all outcomes of a batch with one sample per prompt."""
    totals = torch.zeros(len(chances), dtype=torch.float64)
    p = torch.tensor(chances, dtype=torch.float64)
    for outcome in itertools.product([0.0, 1.0], repeat=len(chances)):
        rewards = torch.tensor(outcome)
        chance = torch.where(rewards > 0, p, 1 - p).prod()
        totals += chance * estimate(rewards, torch.arange(len(chances))).double() * (rewards - p)
    return totals.tolist()


def test_one_sample_per_prompt_shrinks_every_gradient():
    chances = [0.05, 0.3, 0.5, 0.5, 0.8, 0.95]
    result = one_sample_each(estimator("reinforce_pp", std="none"), chances)
    assert result == pytest.approx([5 / 6 * success_gradient(p) for p in chances], rel=1e-4)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_deviation_of_a_large_batch_scales_easy_and_hard_prompts_alike(name):
    """Prompts of 2 %, 30 % and 90 %, 5,000 groups of 8 each: one deviation for all, where grpo has one per group."""
    chances, size, count = torch.tensor([0.02, 0.3, 0.9]), 8, 5_000
    p = chances.repeat_interleave(size * count)
    rewards = (torch.rand(len(p), generator=torch.Generator().manual_seed(0)) < p).float()
    groups = torch.arange(3 * count).repeat_interleave(size)
    mean, inner = chances.mean().item(), (chances * (1 - chances)).mean().item()
    if name == "reinforce_pp":
        shrunk, deviation = 1.0, (mean * (1 - mean)) ** 0.5  # of rewards
    else:
        shrunk = (size - 1) / size
        deviation = (shrunk * inner) ** 0.5  # of differences from the group mean
    for estimate, right in (
        (estimator(name), [shrunk * success_gradient(p) / deviation for p in chances.tolist()]),
        (estimator("grpo"), [grpo_gradient(p, size, "sample") for p in chances.tolist()]),
    ):
        gradients = (estimate(rewards, groups) * (rewards - p)).view(3, count, size).mean(2).double()
        error = gradients.std(1) / count**0.5
        right = torch.tensor(right)
        # the deviation of the batch is slightly off, equally for all prompts
        assert ((gradients.mean(1) - right).abs() < 4 * error + 5e-3 * right).all()


# --- other objectives than the mean success ---------------------------------------------------------------------------


def likelihood_gradient(p: float, order: int) -> float:
    """The gradient of -Σ_{k=1..T} (1 - p)^k / k, log p up to order T: p (1 - p) Σ_{k=1..T} (1 - p)^(k-1)."""
    return success_gradient(p) * sum((1 - p) ** (k - 1) for k in range(1, order + 1))


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("size", [2, 4, 16])
def test_max_rl_ascends_the_likelihood_of_success_up_to_order_g_minus_1(p, size):
    """Its baseline is subtracted only in groups with a success, which costs one order."""
    assert_expected_gradient(estimator("max_rl"), p, size, likelihood_gradient(p, size - 1))


def test_max_rl_approaches_the_gradient_of_log_p_as_groups_grow():
    for p in PROBABILITIES:
        limit = 1 - p  # d log p / dθ
        gaps = [abs(expected_gradient(estimator("max_rl"), p, size) / limit - 1) for size in (2, 8, 32, 512)]
        assert gaps[0] >= gaps[1] >= gaps[2] >= gaps[3]
        assert gaps[3] < 1e-3


@pytest.mark.parametrize("p", PROBABILITIES)
def test_grpo_passk_ascends_the_probability_that_any_sample_succeeds(p):
    """d/dθ of 1 - (1 - p)^G is G (1 - p)^(G-1) p (1 - p); the mean over the group is a G-th of it."""
    for size in (2, 8):
        assert_expected_gradient(
            estimator("grpo_passk", std="none"), p, size, (1 - p) ** (size - 1) * success_gradient(p)
        )


# --- several answers --------------------------------------------------------------------------------------------------

# Answers with one logit each, their rewards and their lengths in tokens. The first token determines the rest.
LOGITS = torch.tensor([0.2, -0.3, -0.3], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.0])
LENGTHS = torch.tensor([2, 2, 8])


def outcomes(size: int) -> tuple[Tensor, Tensor]:
    """Every group of that size [M, G], and its probability [M]."""
    answers = torch.tensor(list(itertools.product(range(len(LOGITS)), repeat=size)))
    return answers, LOGITS.softmax(0)[answers].prod(1)


def test_grpo_passk_is_the_gradient_of_the_expected_maximum_for_any_rewards():
    rewards, size = torch.tensor([1.0, 0.25, -0.5]), 4
    answers, chances = outcomes(size)
    advantages = ESTIMATORS["grpo_passk"](
        rewards[answers].flatten(), torch.arange(len(answers)).repeat_interleave(size), std="none"
    ).view_as(answers)
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    surrogate = (chances[:, None] * advantages * logprobs[answers]).sum()  # the sum over the group, not its mean
    objective = (logprobs.exp()[answers].prod(1) * rewards[answers].max(1).values).sum()
    result, right = (torch.autograd.grad(f, logits, retain_graph=True)[0] for f in (surrogate, objective))
    torch.testing.assert_close(result, right, atol=1e-6, rtol=1e-5)


def gradient_of_update(answers: Tensor, share: Tensor, normalize: str) -> Tensor:
    """The gradient of the loss of a mini-batch of groups [M, G] by the logits; `share` [M] weights the groups.  [3]"""
    count, size = answers.shape
    flat, constant = answers.flatten(), 8
    advantages = ESTIMATORS["rloo"](REWARDS[flat], torch.arange(count).repeat_interleave(size))
    lengths = LENGTHS[flat]
    sequences = torch.arange(len(flat)).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.zeros(len(sequences), dtype=torch.float64).index_add(0, starts, logits.log_softmax(0)[flat])
    loss = LOSSES["reinforce"](logprobs, logprobs.detach(), advantages[sequences], sequences)
    weights = token_weights(lengths, normalize, constant=constant) * (constant if normalize == "constant" else 1)
    shares = (share * count).repeat_interleave(size)[sequences]  # the probability of the group, relative to 1 / M
    return torch.autograd.grad((loss * weights * shares).sum(), logits)[0]


def true_gradient(divide_by: Tensor) -> Tensor:
    """-Σ π(a) (r_a - J) ∇ log π(a) / divisor_a; with a divisor of 1, the gradient of -J, the mean reward.  [3]"""
    logits = LOGITS.clone().requires_grad_()
    chances = logits.softmax(0).detach()
    above = REWARDS - (chances * REWARDS).sum()
    return torch.autograd.grad(-(chances * above / divide_by * logits.log_softmax(0)).sum(), logits)[0]


def test_the_true_gradient_is_that_of_the_mean_reward():
    logits = LOGITS.clone().requires_grad_()
    exact = torch.autograd.grad(-(logits.softmax(0) * REWARDS).sum(), logits)[0]
    torch.testing.assert_close(true_gradient(torch.ones(3)), exact)


@pytest.mark.parametrize("normalize", ["sequence_sum", "constant"])
def test_summing_over_each_sequence_gives_the_true_gradient_for_any_lengths(normalize):
    result = gradient_of_update(*outcomes(3), normalize)
    torch.testing.assert_close(result, true_gradient(torch.ones(3)), atol=1e-6, rtol=1e-5)


def test_averaging_over_each_sequence_divides_its_gradient_by_its_length():
    result = gradient_of_update(*outcomes(3), "sequence_mean")
    torch.testing.assert_close(result, true_gradient(LENGTHS.double()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normalize", ["sequence_sum", "constant", "sequence_mean"])
def test_drawn_groups_have_the_same_gradient_as_all_groups(normalize):
    draws, size, parts = 40_000, 3, 40
    generator = torch.Generator().manual_seed(0)
    answers = torch.multinomial(LOGITS.softmax(0), draws * size, replacement=True, generator=generator).view(
        draws, size
    )
    share = torch.full((draws // parts,), parts / draws, dtype=torch.float64)
    result = torch.stack([gradient_of_update(part, share, normalize) for part in answers.chunk(parts)])
    right = true_gradient(LENGTHS.double() if normalize == "sequence_mean" else torch.ones(3))
    assert ((result.mean(0) - right).abs() < 4 * result.std(0) / parts**0.5).all()


def test_averaging_over_each_sequence_prefers_long_wrong_answers_to_short():
    """Both are wrong and equally likely. The long one is pushed down less, so their probabilities diverge."""
    for normalize, apart in (("sequence_sum", False), ("constant", False), ("sequence_mean", True)):
        _, short, long = (-gradient_of_update(*outcomes(3), normalize)).tolist()
        assert short < 0
        if apart:
            assert long > short + 0.01
        else:
            assert long == pytest.approx(short, rel=1e-5)


def test_averaging_over_each_sequence_pushes_long_wrong_answers_less():
    """A right answer, and a short and a long wrong one: each token of the wrong ones weighs 1/2 and 1/8."""
    lengths, advantages = LENGTHS, torch.tensor([1.0, -0.5, -0.5])
    for normalize, ratio in (("sequence_mean", 4.0), ("sequence_sum", 1.0), ("constant", 1.0), ("token_mean", 1.0)):
        logprobs = torch.full((12,), -0.5, requires_grad=True)
        sequences = torch.arange(3).repeat_interleave(lengths)
        loss = LOSSES["ppo_clip"](logprobs, logprobs.detach(), advantages[sequences], sequences)
        (loss * token_weights(lengths, normalize, constant=5)).sum().backward()
        assert (logprobs.grad[2:] > 0).all()
        assert (logprobs.grad[3] / logprobs.grad[11]).item() == pytest.approx(ratio, rel=1e-5)


# --- KL in the reward -------------------------------------------------------------------------------------------------

# Completions of two tokens, each 0 or 1. The logit of a 1, at the start, after a 0 and after a 1.
POLICY, REFERENCE = torch.tensor([0.3, -0.8, 0.5]), torch.tensor([0.1, -0.5, 0.6])
COMPLETIONS = torch.tensor(list(itertools.product([0, 1], repeat=2)))  # [4, 2]
ANSWER_REWARDS = torch.tensor([0.0, 1.0, 0.5, 0.0])


def token_logprobs(logits: Tensor) -> Tensor:
    """The log-prob of each token of each completion.  [3] -> [4, 2]"""
    of_token = torch.stack([logits[0].expand(4), logits[1:][COMPLETIONS[:, 0]]], 1)
    return torch.nn.functional.logsigmoid(torch.where(COMPLETIONS == 1, of_token, -of_token))


def penalized_gradient(rewards: Tensor, kl_coef: float) -> Tensor:
    """The gradient of the mean reward minus kl_coef · KL, both as sums over all completions.  [3]"""
    logits = POLICY.clone().requires_grad_()
    logprobs, ref = token_logprobs(logits).sum(1), token_logprobs(REFERENCE).sum(1)
    objective = (logprobs.exp() * (rewards - kl_coef * (logprobs - ref))).sum()
    return torch.autograd.grad(objective, logits)[0]


def credited_gradient(rewards: Tensor, kl_coef: float, config: object) -> Tensor:
    """The mean policy gradient over all completions, with the advantages that the loop assigns.  [3]"""
    logits = POLICY.clone().requires_grad_()
    logprobs = token_logprobs(logits)
    old, ref = logprobs.detach().flatten().numpy(), token_logprobs(REFERENCE).flatten().numpy()
    columns = Columns(old=old, ref=ref, values=np.zeros(8, dtype=np.float32))
    batch = make_batch(rewards.tolist(), [0, 1, 2, 3], lengths=[2] * 4)
    advantages = CreditAssignment(config)(1, batch, columns, kl_coef).columns.advantages
    surrogate = logprobs * torch.from_numpy(advantages).view(4, 2)
    chances = logprobs.detach().sum(1).exp()
    return torch.autograd.grad((chances * surrogate.sum(1)).sum(), logits)[0]


@pytest.mark.parametrize(
    "options", [["algorithm.advantage=raw"], ["algorithm.advantage=gae", "algorithm.whiten=false"]]
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1, 3.0])
def test_kl_in_the_reward_has_the_gradient_of_the_penalized_reward_by_default(tmp_path, options, kl_coef):
    config = make_config(tmp_path, *options, "reference.kl_in=reward", "reference.kl_coef=0.1")
    actual = credited_gradient(ANSWER_REWARDS, kl_coef, config)
    torch.testing.assert_close(actual, penalized_gradient(ANSWER_REWARDS, kl_coef), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["k2", "k3", "k3_unbiased"])
def test_the_other_estimators_hardly_hold_the_policy_when_they_are_in_the_reward(tmp_path, name):
    """Their mean is near the KL, but as weights of the policy gradient they are of second order in log(π/ref)."""
    options = ["algorithm.advantage=raw", "reference.kl_in=reward", "reference.kl_coef=1", f"algorithm.kl={name}"]
    exact = penalized_gradient(torch.zeros(4), 1.0)
    actual = credited_gradient(torch.zeros(4), 1.0, make_config(tmp_path, *options))
    assert exact.norm() > 0.05
    assert actual.norm() < 0.2 * exact.norm()
