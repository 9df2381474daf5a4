"""Estimates of KL(policy ‖ reference) from sampled tokens: [T], [T] -> [T].

Schulman 2020, "Approximating KL divergence". All have the same expectation at a fixed policy, except k2, whose bias is small
where the two are close. k1 has the highest variance and no useful gradient as a loss; k3 is never negative.
"""

from collections.abc import Callable

from torch import Tensor


def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """log(π/ref)"""
    return logprobs - ref


def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """½ log²(π/ref)"""
    return (logprobs - ref).square() / 2


def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """ref/π - log(ref/π) - 1"""
    return (ref - logprobs).expm1() - (ref - logprobs)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
