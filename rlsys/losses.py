"""Policy losses: per token, to minimise. Weighting and summing is not their business: see `packing.token_weights`."""

from collections.abc import Callable

import torch
from torch import Tensor


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old).  [T], [T], [T], [T] -> [T]

    Schulman et al. 2017, arXiv 1707.06347, eq. 7; two sides of the clip as in Yu et al. 2025, arXiv 2503.14476.
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """Whether the clip took the token's gradient away.  [T], [T], [T] -> [T] bool"""
    ratio = (logprobs - old).exp()
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
}
