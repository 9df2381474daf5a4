"""Estimates of KL(policy ‖ reference) from sampled tokens, [T], [T] -> [T]; and an adaptive coefficient.

Schulman 2020, "Approximating KL divergence". At a fixed policy all have the same expectation, except k2, whose bias is
small while the two policies are close. In a loss, the gradient matters: that of k2 is the gradient of the true KL, that
of k1 is 0 on average, that of k3 is biased. `k3_unbiased` has the value of k3 and the gradient of k2: 2510.01555
(`k3+` in verl). OpenRLHF can also weigh that gradient by π/old, for stale samples; this does not.
In a reward, the value is a weight of the policy gradient: only k1 then has the gradient of the true KL.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlsys.algorithms.ratios import clamp_log_ratio

# ref/π counts as at most this in k3. Its value is then at most 10, as in verl and OpenRLHF. Its slope is at most 12.6
# and not 0 beyond, so that a token that the policy has given up is still pulled back, but does not dominate the loss.
# They bound the value where π is larger too; here nothing does, because the slope is then less than 1.
MAX_REFERENCE_RATIO = 13.6


def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Returns log(π/ref)."""
    return _log_ratio(logprobs, ref, "k1")


def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Returns ½ log²(π/ref)."""
    return _log_ratio(logprobs, ref, "k2").square() / 2


def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Returns ref/π - log(ref/π) - 1, with ref/π of at most MAX_REFERENCE_RATIO."""
    return _k3(_log_ratio(logprobs, ref, "k3"))


def k3_unbiased(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Returns k3 forward, k2 backward."""
    log_ratio = _log_ratio(logprobs, ref, "k3_unbiased")
    k2_value = log_ratio.square() / 2
    return k2_value + (_k3(log_ratio) - k2_value).detach()


def adapt_coef(coef: float, measured: float, target: float, *, horizon: int = 10) -> float:
    """Returns the next coefficient: raised while KL is above its target, lowered while below; at most 20 % in `horizon` steps.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coef * (1 + error / horizon)


def _k3(log_ratio: Tensor) -> Tensor:
    """Turns log(π/ref) into k3.  [T] -> [T]"""
    bounded = clamp_log_ratio(-log_ratio, most=math.log(MAX_REFERENCE_RATIO))
    linear = torch.where(log_ratio > 0, log_ratio, -bounded)  # unbounded above: ref of probability 0 is an error
    return bounded.expm1() + linear


def _log_ratio(logprobs: Tensor, ref: Tensor, name: str) -> Tensor:
    if logprobs.shape != ref.shape:
        raise ValueError(f"{name}: logprobs {list(logprobs.shape)} and ref {list(ref.shape)} must both be [T].")
    return logprobs.float() - ref.detach().float()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_unbiased": k3_unbiased,
}
