import math

import pytest
import torch

from rlsys.losses import LOSSES, clipped, ppo_clip

ONE = torch.zeros(1, dtype=torch.long)


def loss_and_slope(ratio: float, advantage: float, **clip: float) -> tuple[float, float]:
    """The loss and its derivative by the log-prob, for a single token."""
    logprob = torch.tensor([math.log(ratio) - 2.0], requires_grad=True)
    loss = ppo_clip(logprob, torch.tensor([-2.0]), torch.tensor([advantage]), ONE, **clip)
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # d(-r A)/d logprob = -r A
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # a good token already 1.2 times as likely is pushed no further
        (0.5, 2.0, -1.0, -1.0),  # but may come back
        (0.5, -2.0, 1.6, 0.0),  # a bad token already 0.8 times as likely is pushed no further
        (1.5, -2.0, 3.0, 3.0),  # but may come back
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_are_as_in_the_paper(ratio, advantage, loss, slope):
    assert loss_and_slope(ratio, advantage) == pytest.approx((loss, slope), rel=1e-5)


def test_the_two_sides_of_the_clip_are_set_apart():
    assert loss_and_slope(1.5, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.3, 0.0), rel=1e-5)
    assert loss_and_slope(0.5, -1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((0.9, 0.0), rel=1e-5)
    assert loss_and_slope(1.25, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.25, -1.25), rel=1e-5)


def test_on_policy_the_gradient_is_that_of_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.25])
    ppo_clip(logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 1])).sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 1.25, 1.75])
def test_a_token_counts_as_clipped_exactly_where_its_gradient_is_gone(ratio, advantage):
    options = {"clip_low": 0.3, "clip_high": 0.2}
    _, slope = loss_and_slope(ratio, advantage, **options)
    found = clipped(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), **options)
    assert found.item() == (slope == 0)


def test_the_table_holds_what_it_names():
    assert LOSSES["ppo_clip"] is ppo_clip
