"""Policy losses: per token, to minimise. Weighting and summing is not their business: see `packing.token_weights`.

`LOSSES[name](logprobs [T], old [T], advantages [T], sequences [T], **options) -> [T]`. Tokens of a sequence stand together.
`LOSSES[name].told(...)` is the same with the tokens the clip took hold of, for the metrics.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsys.algorithms.ratios import clamp_log_ratio, probability_ratio
from rlsys.algorithms.segments import Segments
from rlsys.config.options import keyword_options, validate_options


class LossAndClip(NamedTuple):
    loss: Tensor  # [T]
    clipped_low: Tensor  # [T] bool: held at the lower side of the clip
    clipped_high: Tensor  # [T] bool: at the upper side


class PolicyLoss:
    """A loss with what all share: inputs checked, single precision inside."""

    def __init__(self, function: Callable[..., LossAndClip]):
        functools.update_wrapper(self, function)
        self.function, self.name = function, function.__name__
        self.options = keyword_options(function)

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> Tensor:
        return self.with_clip(logprobs, old, advantages, sequences, **options).loss

    def with_clip(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any
    ) -> LossAndClip:
        shapes = [list(t.shape) for t in (logprobs, old, advantages, sequences)]
        if any(s != shapes[0] for s in shapes) or logprobs.dim() != 1:
            raise ValueError(
                f"{self.name}: logprobs, old, advantages and sequences are {', '.join(map(str, shapes))}; each must be [T]."
            )
        options = validate_options(self.name, options, self.options, numbers=self.options)
        return self.function(logprobs.float(), old.detach().float(), advantages.detach().float(), sequences, **options)


@PolicyLoss
def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossAndClip:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7; two sides of the clip as in Yu et al. 2025 (DAPO), arXiv 2503.14476.
    `dual_clip` c > 1 bounds the loss of bad tokens by -c A: Ye et al. 2020, arXiv 1912.09729.
    """
    r = probability_ratio(logprobs, old)
    loss = -torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    low, high = clip_masks(r, advantages, 1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"ppo_clip: dual_clip is {dual_clip}; it must be greater than 1, or None for none.")
        beyond = (advantages < 0) & (r > dual_clip)
        loss, high = torch.where(beyond, -dual_clip * advantages, loss), high | beyond
    return LossAndClip(loss, low, high)


@PolicyLoss
def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossAndClip:
    """The clip of the sequence's ratio, s = exp(mean over its tokens of logprobs - old), the same for all its tokens.

    Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 7. The paper sums with `sequence_mean`.
    """
    segments = Segments(sequences)
    s = clamp_log_ratio(segments.broadcast(segments.mean(logprobs - old))).exp()
    loss = -torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return LossAndClip(loss, *clip_masks(s, advantages, 1 - clip_low, 1 + clip_high))


@PolicyLoss
def cispo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossAndClip:
    """-clip(r, 1 - clip_low, 1 + clip_high) A logprobs, the clipped ratio without gradient: no token is left out.

    MiniMax 2025, arXiv 2506.13585, eq. 4 and 5. A clip_low of 1 is no lower side, as in the paper.
    """
    r = probability_ratio(logprobs, old).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    return LossAndClip(-weight * advantages * logprobs, r < 1 - clip_low, r > 1 + clip_high)


@PolicyLoss
def gmpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossAndClip:
    """-A times the geometric mean over the sequence of r, each clipped on the side its advantage pushes to.

    Zhao et al. 2025, arXiv 2507.20673. The clip is of log r: r stays in (e^-clip_low, e^clip_high).
    """
    segments = Segments(sequences)
    log_r = clamp_log_ratio(logprobs - old)
    low, high = clip_masks(log_r, advantages, -clip_low, clip_high)
    clipped = torch.where(low, -clip_low, torch.where(high, clip_high, log_r))
    return LossAndClip(-advantages * segments.broadcast(segments.mean(clipped)).exp(), low, high)


@PolicyLoss
def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossAndClip:
    """-(4/τ) σ(τ (r - 1)) A: a soft gate in place of the clip, τ by the sign of A.

    Gao et al. 2025, arXiv 2511.20347. On policy the gradient is the policy gradient's; away from it, it fades on both sides.
    """
    if not (tau_pos and tau_neg):
        raise ValueError(f"sapo: tau_pos is {tau_pos}, tau_neg {tau_neg}; both must be above 0.")
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (probability_ratio(logprobs, old) - 1)) * 4 / tau
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return LossAndClip(-gate * advantages, never, never)


@PolicyLoss
def dppo_tv(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
) -> LossAndClip:
    """-r A, left out once the token's probability itself, not its ratio, has moved too far to the side A pushes to.

    Qi et al. 2026, arXiv 2602.04879, with binary total variation |π - old|: rare tokens are freer than with a clipped ratio.
    The paper measures from the policy that sampled; so does this where `old` is that policy.
    """
    moved = logprobs.detach().exp() - old.exp()
    low, high = clip_masks(moved, advantages, -clip_low, clip_high)
    return LossAndClip(torch.where(low | high, 0.0, -probability_ratio(logprobs, old) * advantages), low, high)


@PolicyLoss
def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> LossAndClip:
    """-A logprobs: the plain policy gradient (Williams 1992). Nothing holds it when the batch is not its own."""
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return LossAndClip(-advantages * logprobs, never, never)


def report_clip(function: Callable[..., Any]) -> Callable[..., LossAndClip]:
    """Any loss as one that tells; a user's own tells of no clip."""
    if isinstance(function, PolicyLoss):
        return function.with_clip

    def told(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> LossAndClip:
        loss = function(logprobs, old, advantages, sequences, **options)
        never = torch.zeros_like(advantages, dtype=torch.bool)
        return LossAndClip(loss, never, never)

    return told


# --- parts ---------------------------------------------------------------------------------------------------------------


def clip_masks(value: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Tokens already beyond the side their advantage pushes to: bad ones below `low`, good ones above `high`."""
    return (value < low) & (advantages < 0), (value > high) & (advantages > 0)


LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "reinforce": reinforce,
}
