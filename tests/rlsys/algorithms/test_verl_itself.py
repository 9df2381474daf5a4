"""The rows of verl in `test_published_losses.py`, computed by verl again. `make published` puts it into a folder of its own."""

import os
import re
import sys
from typing import Any

import pytest
import test_published_losses as published
import torch
from torch import Tensor

FOLDER = os.environ.get("RLSYS_VERL", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="RLSYS_VERL names no folder with verl; `make published` makes one")
MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]).float()
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LOSS = re.compile(r"verl (vanilla|gspo|geo_mean|cispo|sapo|gpg|dppo_tv) .*(MIXED|SHARED)( rollout_is=(\w+) ([\d._]+))?")
NAMES = [name for name in published.PUBLISHED if LOSS.fullmatch(name)]
DIVERGENCES = [name for name in published.PUBLISHED if name.startswith("verl kl_penalty")]
CRITICS = [name for name in published.PUBLISHED if name.startswith("verl compute_value_loss")]


@pytest.fixture(scope="module")
def algorithms() -> Any:
    sys.path.append(FOLDER)
    import verl
    from verl.trainer.ppo import core_algos

    assert verl.__version__ == "0.9.1"
    return core_algos


def spread(column: list[float]) -> Tensor:
    """In four rows, with zeros where there is no token of the model."""
    return torch.zeros(MASK.shape).masked_scatter(MASK.bool(), torch.tensor(column))


def options_of(name: str) -> dict[str, float]:
    return {key: float(value) for key, value in re.findall(r"(\w+)=(-?[\d.]+)(?= |$)", name)}


def aggregation(name: str) -> str:
    return next((word for word in name.split() if word in AGGREGATIONS), "seq-mean-token-mean")


def at(name: str) -> list[float]:
    return published.FAR if name.endswith("FAR") else published.LOGPROBS


@pytest.mark.parametrize("name", NAMES)
def test_policy_losses(algorithms: Any, name: str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    kind, advantages, _, level, threshold = LOSS.fullmatch(name).groups()
    given = options_of(name.split(" MIXED")[0])
    low, high = given.get("low", 0.2), given.get("high", 0.2)
    options = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=given.get("c", 3.0),
        tau_pos=given.get("tau_pos", 1.0),
        tau_neg=given.get("tau_neg", 1.05),
        policy_loss=PolicyLossConfig(loss_mode=kind),
    )
    old, weights = spread(published.OLD), None
    if level:
        weights, _ = compute_rollout_correction_weights(
            old - spread(published.ROLLOUT), MASK, level, threshold if "_" in threshold else float(threshold)
        )

    def loss(logprobs: Tensor) -> Tensor:
        padded = torch.zeros(MASK.shape).masked_scatter(MASK.bool(), logprobs)
        function, scores = algorithms.get_policy_loss_fn(kind), spread(getattr(published, advantages))
        return function(old, padded, scores, MASK, aggregation(name), options, weights)[0]

    published.assert_equal(published.differentiate(loss), published.PUBLISHED[name])


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
        padded = torch.zeros(MASK.shape).masked_scatter(MASK.bool(), values)
        returns, old = spread(published.RETURNS), spread(published.OLD_VALUES)
        return algorithms.compute_value_loss(padded, returns, old, MASK, 0.2, aggregation(name))[0]

    published.assert_equal(published.differentiate(loss, published.VALUES), published.PUBLISHED[name])
