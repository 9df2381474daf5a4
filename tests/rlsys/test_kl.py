import math

import pytest
import torch

from rlsys.kl import ESTIMATORS, k1, k2, k3


def test_the_three_estimators_by_hand():
    """The policy finds the token twice as likely as the reference: log π/ref = log 2, ref/π = 1/2."""
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(logprobs, ref).item() == pytest.approx(math.log(2), rel=1e-6)
    assert k2(logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-6)
    assert k3(logprobs, ref).item() == pytest.approx(0.5 + math.log(2) - 1, rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_equal_policies_are_no_distance_apart(name):
    logprobs = torch.tensor([-0.1, -3.0, -20.0])
    assert ESTIMATORS[name](logprobs, logprobs).tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimate", [k1, k3])
def test_the_mean_over_the_policy_is_the_divergence(estimate):
    policy, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / ref).log()).sum()
    assert (policy * estimate(policy.log(), ref.log())).sum() == pytest.approx(exact.item(), rel=1e-5)


def test_k3_is_never_negative_and_k1_may_be():
    gap = torch.linspace(-3, 3, 61)
    assert (k3(gap, torch.zeros(61)) >= 0).all()
    assert (k2(gap, torch.zeros(61)) >= 0).all()
    assert (k1(gap, torch.zeros(61)) < 0).any()


def test_k3_pulls_towards_the_reference():
    """d k3 / d log π = 1 - ref/π: positive where the policy likes the token more, so that descent lowers it."""
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    k3(logprobs, torch.tensor([math.log(0.25), math.log(0.5)])).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.5, -1.0], rel=1e-5)


def test_the_estimators_agree_where_the_policies_are_close():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.01])
    assert k3(logprobs, ref).item() == pytest.approx(k2(logprobs, ref).item(), rel=1e-2)
