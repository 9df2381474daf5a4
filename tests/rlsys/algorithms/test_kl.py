import math

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.kl import ESTIMATORS, adapt_coef, k1, k2, k3, k3_unbiased

SIXTEENTHS = st.integers(-128, 0).map(lambda n: n / 16)


@settings(max_examples=50)
@given(st.lists(st.tuples(SIXTEENTHS, SIXTEENTHS), max_size=12))
def test_estimates_and_slopes_equal_the_plain_formulas(pairs):
    policy, ref = [p for p, _ in pairs], [q for _, q in pairs]
    for name, estimate in ESTIMATORS.items():
        logprobs = torch.tensor(policy, requires_grad=True)
        result = estimate(logprobs, torch.tensor(ref))
        result.sum().backward()
        values, slopes = plain.KL[name](policy, ref)
        assert result.tolist() == pytest.approx(values, rel=1e-5, abs=1e-5), name
        assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-5), name


def test_the_estimators_by_hand():
    """The token is twice as likely for the policy: log π/ref = log 2, ref/π = 1/2."""
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(logprobs, ref).item() == pytest.approx(math.log(2), rel=1e-6)
    assert k2(logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-6)
    assert k3(logprobs, ref).item() == pytest.approx(0.5 + math.log(2) - 1, rel=1e-5)
    assert k3_unbiased(logprobs, ref).item() == pytest.approx(0.5 + math.log(2) - 1, rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_policies_have_a_divergence_of_0(name):
    logprobs = torch.tensor([-0.1, -3.0, -20.0])
    assert ESTIMATORS[name](logprobs, logprobs).tolist() == [0, 0, 0]


POLICY, REF = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])


@pytest.mark.parametrize("estimate", [k1, k3, k3_unbiased])
def test_the_mean_over_the_policy_is_the_divergence(estimate):
    exact = (POLICY * (POLICY / REF).log()).sum()
    assert (POLICY * estimate(POLICY.log(), REF.log())).sum() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_k2_and_k3_unbiased_have_the_gradient_of_the_divergence(name):
    """A term of the loss is differentiated with fixed samples. The mean gradient of k1 is then 0."""
    logits = POLICY.log().requires_grad_()
    truth = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - REF.log())).sum(), logits)[0]
    sampled = torch.autograd.grad((POLICY * ESTIMATORS[name](logits.log_softmax(0), REF.log())).sum(), logits)[0]
    if name in ("k2", "k3_unbiased"):
        torch.testing.assert_close(sampled, truth)
    elif name == "k1":
        assert sampled.abs().max() < 1e-6
    else:
        assert (sampled - truth).abs().max() > 0.05


def test_k3_is_never_negative_and_k1_may_be():
    gap = torch.linspace(-3, 3, 61)
    assert (k3(gap, torch.zeros(61)) >= 0).all()
    assert (k2(gap, torch.zeros(61)) >= 0).all()
    assert (k1(gap, torch.zeros(61)) < 0).any()


def test_k3_keeps_its_digits_where_the_policies_are_close():
    gap = 1e-4
    assert k3(torch.tensor([gap]), torch.zeros(1)).item() == pytest.approx(gap**2 / 2, rel=1e-2)


def test_k3_pulls_towards_the_reference():
    """d k3 / d log π = 1 - ref/π: positive where the policy is above the reference, so descent lowers it."""
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    k3(logprobs, torch.tensor([math.log(0.25), math.log(0.5)])).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.5, -1.0], rel=1e-5)


def test_the_estimators_agree_where_the_policies_are_close():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.01])
    assert k3(logprobs, ref).item() == pytest.approx(k2(logprobs, ref).item(), rel=1e-2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_flows_into_the_policy_alone(name):
    logprobs, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    ESTIMATORS[name](logprobs, ref).sum().backward()
    assert logprobs.grad.any()
    assert ref.grad is None


@pytest.mark.parametrize("name", ESTIMATORS)
def test_half_precision_is_computed_in_full_precision(name):
    logprobs, ref = torch.linspace(-3, -0.1, 9).bfloat16(), torch.linspace(-0.2, -2, 9).bfloat16()
    result = ESTIMATORS[name](logprobs, ref)
    assert result.dtype == torch.float32
    assert torch.equal(result, ESTIMATORS[name](logprobs.float(), ref.float()))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_tokens_there_are_no_estimates(name):
    assert ESTIMATORS[name](torch.zeros(0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_log_probs_of_different_shape_are_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: logprobs \[2\] and ref \[1\] must both be \[T\]"):
        ESTIMATORS[name](torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize("name", ["k3", "k3_unbiased"])
def test_a_token_of_tiny_probability_has_a_finite_divergence(name):
    assert ESTIMATORS[name](torch.tensor([-100.0]), torch.tensor([0.0])).isfinite().all()


@pytest.mark.parametrize("gap", [2.7, 16.0, 100.0])
def test_a_token_that_the_policy_has_given_up_cannot_outweigh_the_others(gap):
    """ref/π = e^16 would have a value of 8.9 million. It counts as 13.6: 13.6 - log 13.6 - 1, slope 1 - 13.6."""
    logprobs = torch.tensor([-gap], requires_grad=True)
    value = k3(logprobs, torch.zeros(1))
    value.sum().backward()
    assert value.item() == pytest.approx(9.99, abs=0.005)
    assert logprobs.grad.item() == pytest.approx(-12.6, rel=1e-5), "it is still pulled towards the reference"
    assert k3_unbiased(logprobs, torch.zeros(1)).item() == pytest.approx(9.99, abs=0.005)


@pytest.mark.parametrize("gap", [-2.6, -1e-3, 0.0, 1e-3, 2.6, 19.0])
def test_up_to_its_bound_k3_is_the_plain_formula(gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    value = k3(logprobs, torch.zeros(1))
    value.sum().backward()
    plainly = torch.tensor([gap])
    assert torch.equal(value.detach(), (-plainly).expm1() + plainly)
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(-gap), rel=1e-5, abs=1e-7)


def test_a_reference_of_probability_0_is_an_infinite_divergence():
    assert k3(torch.zeros(1), torch.tensor([-math.inf])).item() == math.inf


def test_the_table_holds_what_it_names():
    assert all(function.__name__ == name for name, function in ESTIMATORS.items())
    assert set(ESTIMATORS) == set(plain.KL)


# --- the coefficient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(2.0, 1.0), (2.2, 1.01), (1.8, 0.99), (50.0, 1.02), (0.0, 0.98)],  # 10 % off, at most 20 %, in 10 steps
)
def test_the_coefficient_rises_above_the_target_and_falls_below_it(measured, factor):
    assert adapt_coef(0.5, measured, 2.0, horizon=10) == pytest.approx(0.5 * factor)


def test_a_divergence_that_follows_its_coefficient_reaches_its_target():
    coef = 0.01
    for _ in range(400):
        coef = adapt_coef(coef, 0.1 / coef, 2.0, horizon=5)
    assert 0.1 / coef == pytest.approx(2.0, rel=1e-3)
