"""Ratios of probabilities, from log-probs, in a range where single precision is accurate."""

from torch import Tensor

MAX_LOG_RATIO = (
    20.0  # larger ones count as this; e^20 is far beyond any useful ratio, and an infinite one breaks the loss
)


def clamp_log_ratio(log_ratio: Tensor, most: float = MAX_LOG_RATIO) -> Tensor:
    """Clamps a log-ratio to [-MAX_LOG_RATIO, most].  [T] -> [T]

    The gradient is that of the unclamped value, so that training can still pull a distant token back.
    """
    finite = log_ratio.clamp(-1e4, 1e4)
    return finite.clamp(-MAX_LOG_RATIO, most).detach() + (finite - finite.detach())


def probability_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Returns π / old.  [T], [T] -> [T]"""
    return clamp_log_ratio(logprobs - old).exp()
