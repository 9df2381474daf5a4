"""Ratios of probabilities from log-probs, held where single precision can follow."""

from torch import Tensor

MAX_LOG_RATIO = (
    20.0  # a log-ratio beyond this counts as this: e^20 is hardly a ratio any more, and an infinite one no number
)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio between -FARTHEST and FARTHEST. The gradient is as if it were not held: what is far off can still come back."""
    finite = log_ratio.clamp(-1e4, 1e4)
    return finite.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach() + (finite - finite.detach())


def probability_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """π / old.  [T], [T] -> [T]"""
    return clamp_log_ratio(logprobs - old).exp()
