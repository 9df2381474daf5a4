"""The rows of OpenRLHF in `test_published_losses.py` and `test_published_advantages.py`, computed by OpenRLHF again."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import test_published_advantages
import test_published_losses as published
import torch
from libraries import MASK, advantages_of, at, fill, import_from, needed, spread, without_inits
from torch import Tensor

pytestmark = needed
POLICIES, DIVERGENCES, CRITICS = (
    [name for name in published.PUBLISHED if name.startswith(f"OpenRLHF {function}")]
    for function in ("PolicyLoss", "compute_approx_kl", "ValueLoss")
)
ADVANTAGES = [name for name in test_published_advantages.PUBLISHED if name.startswith("OpenRLHF ")]


@pytest.fixture(scope="module")
def losses() -> Any:
    packages = ("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils")
    without_inits(*packages, openrlhf__trainer__ray__launcher__RayActorGroup=None)
    return import_from("openrlhf", "openrlhf.models.loss", "0.11.2")


def made(losses: Any, name: str) -> Any:
    """The loss that a row names by the call that makes it. `PolicyLoss(0.2, 0.28, dual_clip=3)`"""
    call = ast.parse(name[len("OpenRLHF ") : name.index(")") + 1], mode="eval").body
    assert isinstance(call, ast.Call)
    values = [ast.literal_eval(value) for value in call.args]
    words = {word.arg: read_value(word.value) for word in call.keywords}
    return getattr(losses, ast.unparse(call.func))(*values, **words)


def read_value(value: ast.expr) -> Any:
    return value.id if isinstance(value, ast.Name) else ast.literal_eval(value)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_losses(losses: Any, name: str) -> None:
    function, rest = made(losses, name), (spread(published.OLD), advantages_of(name), MASK, spread(published.ROLLOUT))
    result = published.differentiate(lambda logprobs: function(fill(logprobs), *rest)[0])
    published.assert_equal(result, published.PUBLISHED[name])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(losses: Any, name: str) -> None:
    from openrlhf.models.utils import compute_approx_kl

    reference = torch.tensor(published.FAR_REFERENCE if name.endswith("FAR") else published.REFERENCE)
    old = torch.tensor(published.OLD) if name.endswith("with OLD") else None
    options = {"kl_estimator": name.split()[2].strip(","), "unbiased_gradient": "unbiased_gradient" in name}

    def loss(logprobs: Tensor) -> Tensor:
        values = compute_approx_kl(logprobs[None], reference[None], old if old is None else old[None], **options)
        return losses.aggregate_loss(values, torch.ones(values.shape))

    published.assert_equal(published.differentiate(loss, at(name)), published.PUBLISHED[name])


@pytest.mark.parametrize("name", CRITICS)
def test_value_losses(losses: Any, name: str) -> None:
    function, rest = made(losses, name), (spread(published.OLD_VALUES), spread(published.RETURNS), MASK)
    result = published.differentiate(lambda values: function(fill(values), *rest), published.VALUES)
    published.assert_equal(result, published.PUBLISHED[name])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(losses: Any, name: str) -> None:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    samples = test_published_advantages.SAMPLES
    mask = torch.arange(8) < torch.tensor(samples.lengths)[:, None]
    batch = Experience(
        rewards=torch.tensor(samples.rewards), action_mask=mask, kl=torch.zeros(mask.shape), index=[*range(6)]
    )
    advantage = SimpleNamespace(estimator="reinforce", gamma=1.0, no_std_norm=name.endswith("no_std_norm"))
    arguments = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=1),
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.strategy, maker.kl_ctl = SimpleNamespace(args=arguments), SimpleNamespace(value=0.0)
    maker.advantage_estimator = "reinforce"
    (result,) = maker.compute_advantages_and_returns([batch])
    assert result.advantages[:, 0].tolist() == pytest.approx(test_published_advantages.PUBLISHED[name][2], abs=5e-6)
