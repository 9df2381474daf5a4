"""The rows of verl in `test_published_losses.py` and `test_published_advantages.py`, computed by verl again."""

import re
from typing import Any

import numpy as np
import pytest
import test_published_advantages
import test_published_losses as published
import torch
from libraries import MASK, advantages_of, at, fill, import_from, needed, options_of, spread
from torch import Tensor

pytestmark = needed
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ROLLOUT = re.compile(r"rollout_(is|rs)=(\w+) ([\w.]+)")
DIVERGENCES = [name for name in published.PUBLISHED if name.startswith("verl kl_penalty")]
CRITICS = [name for name in published.PUBLISHED if name.startswith("verl compute_value_loss")]
LOSSES = [name for name in published.PUBLISHED if name.startswith("verl ") and name not in (*DIVERGENCES, *CRITICS)]
ADVANTAGES = [name for name in test_published_advantages.PUBLISHED if name.startswith("verl ")]


@pytest.fixture(scope="module")
def algorithms() -> Any:
    return import_from("verl", "verl.trainer.ppo.core_algos", "0.9.1")


def aggregation(name: str) -> str:
    return next((word for word in name.split() if word in AGGREGATIONS), "seq-mean-token-mean")


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(algorithms: Any, name: str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_correction_weights,
        compute_rollout_rejection_mask,
    )
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    kind, given = name.split()[1], options_of(name.split(" MIXED")[0].split(" SHARED")[0])
    own = {key: value for key, value in given.items() if key.startswith(("clip_cov", "kl_cov", "ppo_kl"))}
    options = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=given.get("low", 0.2),
        clip_ratio_high=given.get("high", 0.2),
        clip_ratio_c=given.get("c", 3.0),
        tau_pos=given.get("tau_pos", 1.0),
        tau_neg=given.get("tau_neg", 1.05),
        policy_loss=PolicyLossConfig(loss_mode=kind, **own),
    )
    old, mask, weights = spread(published.OLD), MASK, None
    log_ratio = old - spread(published.ROLLOUT)
    for use, level, threshold in ROLLOUT.findall(name):
        if use == "is":
            bound = threshold if "_" in threshold else float(threshold)
            weights, _ = compute_rollout_correction_weights(log_ratio, MASK, level, bound)
        else:
            mask, _ = compute_rollout_rejection_mask(log_ratio, MASK, level, threshold)

    def loss(logprobs: Tensor) -> Tensor:
        function = algorithms.get_policy_loss_fn(kind)
        return function(old, fill(logprobs), advantages_of(name), mask, aggregation(name), options, weights)[0]

    begin = published.OLD if name.endswith("log-probs OLD") else published.LOGPROBS
    published.assert_equal(published.differentiate(loss, begin), published.PUBLISHED[name])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(algorithms: Any, name: str) -> None:
    reference = published.FAR_REFERENCE if name.endswith("FAR") else published.REFERENCE
    estimator = name.split()[2].strip(",")

    def loss(logprobs: Tensor) -> Tensor:
        values = algorithms.kl_penalty(logprobs, torch.tensor(reference), estimator)
        return algorithms.agg_loss(values[None], torch.ones(1, len(reference)), "token-mean")

    published.assert_equal(published.differentiate(loss, at(name)), published.PUBLISHED[name])


@pytest.mark.parametrize("name", CRITICS)
def test_value_losses(algorithms: Any, name: str) -> None:
    def loss(values: Tensor) -> Tensor:
        returns, old = spread(published.RETURNS), spread(published.OLD_VALUES)
        return algorithms.compute_value_loss(fill(values), returns, old, MASK, 0.2, aggregation(name))[0]

    published.assert_equal(published.differentiate(loss, published.VALUES), published.PUBLISHED[name])


@pytest.mark.parametrize(("gamma", "lam"), published.GAE)
def test_advantages_and_returns_from_a_critic(algorithms: Any, gamma: float, lam: float) -> None:
    rewards, values = spread(published.REWARDS), spread(published.OLD_VALUES)
    results = algorithms.compute_gae_advantage_return(rewards, values, MASK, gamma, lam)
    for result, expected in zip(results, published.GAE[gamma, lam], strict=True):
        assert result[MASK.bool()].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(algorithms: Any, name: str) -> None:
    from verl.trainer.config import AlgoConfig

    samples = test_published_advantages.SAMPLES
    lengths = torch.tensor(samples.lengths)
    mask = (torch.arange(8) < lengths[:, None]).float()
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(lengths)), lengths - 1] = torch.tensor(samples.rewards).float()
    function = algorithms.get_adv_estimator_fn(name.split()[1])
    result, _ = function(
        token_level_rewards=rewards, response_mask=mask, index=np.array(samples.groups), config=AlgoConfig()
    )
    expected = test_published_advantages.PUBLISHED[name][2]
    assert result[:, 0].tolist() == pytest.approx(expected, abs=5e-6)


def test_entropy(algorithms: Any) -> None:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    logits = torch.tensor(published.LOGITS, requires_grad=True)
    entropy = entropy_from_logits(logits)
    (entropy * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    logprobs = logprobs_from_logits(logits.detach(), torch.tensor(published.CHOSEN))
    assert logprobs.tolist() == pytest.approx(published.ENTROPY["logprobs"], abs=5e-5)
    assert entropy.tolist() == pytest.approx(published.ENTROPY["entropy"], abs=5e-5)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx(published.ENTROPY["gradient"], abs=5.1e-5)
