"""Corrections for samples from another policy than the one trained: an engine that rounds differently or lags behind.

    CORRECTIONS[name](old [T], rollout [T], sequences [T], **options) -> [T]

A correction is a weight for each token's loss, without gradient, computed from the ratio old / rollout of the sampled
token's probabilities. Truncated ratios are biased but keep every token. Masked ratios drop tokens whose ratio is too
large. A dropped token still counts in the token weights, as in TRL; verl takes it out of them. The method `none` is not
in the table: it applies no weight.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.ratios import clamp_log_ratio
from rlsys.algorithms.segments import Segments
from rlsys.config.options import keyword_options, validate_options


def correction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a correction: validates its inputs and computes in single precision, without gradient."""
    name, known = function.__name__, keyword_options(function)

    @functools.wraps(function)
    def checked(old: Tensor, rollout: Tensor, sequences: Tensor, **options: Any) -> Tensor:
        shapes = [list(t.shape) for t in (old, rollout, sequences)]
        if any(s != shapes[0] for s in shapes) or old.dim() != 1:
            raise ValueError(f"{name}: old, rollout and sequences are {', '.join(map(str, shapes))}; each must be [T].")
        options = validate_options(name, options, known, numbers=known)
        with torch.no_grad():
            return function(old.float() - rollout.float(), sequences, **options)

    return checked


@correction
def tis(log_ratio: Tensor, sequences: Tensor, *, high: float = 2.0) -> Tensor:
    """Returns min(ratio, high) of each token: truncated importance sampling (Yao et al. 2025; Ionides 2008)."""
    return clamp_log_ratio(log_ratio).exp().clamp(max=high)


@correction
def mis(log_ratio: Tensor, sequences: Tensor, *, high: float = 2.0) -> Tensor:
    """Returns the ratio of each token, 0 where it is above `high`: masked importance sampling (Liu, Li et al. 2025)."""
    return zero_outside(clamp_log_ratio(log_ratio).exp(), 0.0, high)


@correction
def sequence_tis(log_ratio: Tensor, sequences: Tensor, *, high: float = 2.0) -> Tensor:
    """Returns min(ratio, high) of the whole sequence, the product of its tokens' ratios, for each of its tokens."""
    return clamp_log_ratio(sum_over_sequence(log_ratio, sequences)).exp().clamp(max=high)


@correction
def sequence_mis(log_ratio: Tensor, sequences: Tensor, *, high: float = 2.0) -> Tensor:
    """Returns the ratio of the whole sequence for each of its tokens; 0 for all of them where it is above `high`."""
    return zero_outside(clamp_log_ratio(sum_over_sequence(log_ratio, sequences)).exp(), 0.0, high)


@correction
def icepop(log_ratio: Tensor, sequences: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Returns the ratio of each token, 0 outside of [low, high]: masked on both sides (Ling team 2025, arXiv 2510.18855)."""
    if low > high:
        raise ValueError(f"icepop: low is {low}, above high, {high}; every token would weigh 0.")
    return zero_outside(clamp_log_ratio(log_ratio).exp(), low, high)


# --- building blocks --------------------------------------------------------------------------------------------------


def sum_over_sequence(values: Tensor, sequences: Tensor) -> Tensor:
    """Gives each token the sum over its sequence.  [T], [T] -> [T]"""
    segments = Segments(sequences)
    return segments.broadcast(segments.sum(values))


def zero_outside(weights: Tensor, low: float, high: float) -> Tensor:
    """Sets weights outside of [low, high] to 0.  [T] -> [T]"""
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "tis": tis,
    "mis": mis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "icepop": icepop,
}
