"""Policy losses: one value per token, to be minimized. `packing.token_weights` weights them; a rank sums the products.

    LOSSES[name](logprobs [T], old [T], advantages [T], sequences [T], **options) -> [T]

`old` are the log-probs before the step, `sequences` the id of each token's sequence, whose tokens stand together.
`LOSSES[name].with_clip(...)` also returns which tokens are clipped, for the metrics.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsys.algorithms.ratios import clamp_log_ratio, probability_ratio
from rlsys.algorithms.segments import Segments
from rlsys.config.options import keyword_options, require_shape, validate_options


class LossAndClip(NamedTuple):
    """A loss per token, and which tokens are clipped: those have no gradient (with cispo, a smaller one)."""

    loss: Tensor  # [T]
    clipped_low: Tensor  # [T] bool, at the lower side of the clip
    clipped_high: Tensor  # [T] bool, at the upper side


class PolicyLoss:
    """Wraps a loss: validates its inputs and computes in single precision."""

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
                f"{self.name}: logprobs, old, advantages and sequences are {', '.join(map(str, shapes))}; "
                "each must be [T]."
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
    dual_clip: float = 10.0,
) -> LossAndClip:
    """Returns -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7; separate bounds as in Yu et al. 2025 (DAPO), arXiv 2503.14476.
    `dual_clip` c > 1 bounds the loss of tokens with A < 0 by -c A: Ye et al. 2020, arXiv 1912.09729. 0 means no bound;
    one token whose probability has risen from 1e-6 to 0.1 then takes the whole clipped gradient.
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"ppo_clip: dual_clip is {dual_clip}; it must be greater than 1, or 0 for no bound.")
    r = probability_ratio(logprobs, old)
    return clip_ratio(r, advantages, 1 - clip_low, 1 + clip_high, dual_clip)


@PolicyLoss
def advantage_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 10.0,
) -> LossAndClip:
    """Returns the loss of ppo_clip with bounds that widen the more a completion differs from its group.

    1 - w clip_low <= r <= 1 + w clip_high, w = 1 + |A| / (1 + |A|): from 1 at A = 0 to 2. From no paper: our own.
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"advantage_clip: dual_clip is {dual_clip}; it must be greater than 1, or 0 for no bound.")
    width = 2 - 1 / (1 + advantages.abs())
    r = probability_ratio(logprobs, old)
    return clip_ratio(r, advantages, 1 - clip_low * width, 1 + clip_high * width, dual_clip)


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
    """Returns the clipped loss of the sequence's ratio s = exp(mean over its tokens of logprobs - old), for all its tokens.

    Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 7. Its token weights are `sequence_mean`, as for gmpo and sapo. Each
    token has the gradient of its own advantage (GSPO-token, section 4.3): the same where a sequence has one advantage.
    """
    segments = Segments(sequences)
    log_s = segments.broadcast(segments.mean(logprobs - old)).detach()
    s = clamp_log_ratio(log_s + (logprobs - logprobs.detach())).exp()
    return clip_ratio(s, advantages, 1 - clip_low, 1 + clip_high)


@PolicyLoss
def dcpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.16,
    clip_high: float = 0.2,
    max_ratio: float = 10.0,
) -> LossAndClip:
    """Returns the loss of ppo_clip with bounds that follow q, the token's old probability: a rare token may change more.

    ½ + ½ √max(1 - 4 clip_low / q, 0) <= r <= ½ + ½ √(1 + 4 clip_high / q), and r <= max_ratio for any advantage.

    Yang et al. 2025, arXiv 2509.02333. The bounds solve |r - 1| r q <= clip. The lower one is never below ½, where
    (1 - r) r is largest. The paper also smooths advantages over steps, which this does not.
    """
    if max_ratio <= 1:
        raise ValueError(f"dcpo: max_ratio is {max_ratio}; it must be greater than 1.")
    q = old.exp().clamp(min=1e-30)  # not 0, so that 0 / q is 0
    low = 0.5 + 0.5 * (1 - 4 * clip_low / q).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * clip_high / q).sqrt()
    return clip_ratio(probability_ratio(logprobs, old), advantages, low, high.clamp(max=max_ratio), max_ratio)


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
    """Returns -clip(r, 1 - clip_low, 1 + clip_high) A logprobs, without gradient through r: every token keeps a gradient.

    MiniMax 2025, arXiv 2506.13585, eq. 4 and 5. A `clip_low` of 1 means no lower bound, as in the paper.
    """
    r = probability_ratio(logprobs, old).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    teaches = advantages != 0  # only a token with an advantage has a gradient to clip
    return LossAndClip(-weight * advantages * logprobs, teaches & (r < 1 - clip_low), teaches & (r > 1 + clip_high))


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
    """Returns -A times the geometric mean of r over the sequence; each r is clipped on the side that A pushes it to.

    Zhao et al. 2025, arXiv 2507.20673. The bounds apply to log r: r stays in (e^-clip_low, e^clip_high).
    A correction's weights multiply it for each token, so a sequence gets their mean; in verl, their geometric mean.
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
    """Returns -(4/τ) σ(τ (r - 1)) A: a soft gate instead of a clip; τ depends on the sign of A.

    Gao et al. 2025, arXiv 2511.20347. On policy the gradient is the policy gradient; it fades as r moves away from 1.
    """
    if not (tau_pos and tau_neg):
        raise ValueError(f"sapo: tau_pos is {tau_pos}, tau_neg {tau_neg}; both must be above 0.")
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (probability_ratio(logprobs, old) - 1)) * 4 / tau
    return unclipped(-gate * advantages)


@PolicyLoss
def dppo_tv(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    max_ratio: float = 20.0,
) -> LossAndClip:
    """Returns -min(r, max_ratio) A, and 0 once the token's probability has moved too far to the side that A pushes it to.

    Qi et al. 2026, arXiv 2602.04879, with binary total variation |π - old|: rare tokens may change more than with a
    clipped ratio. The paper measures from the policy that sampled, which this does if `old` is that policy. It
    truncates r as an importance weight: a token above `max_ratio` keeps a gradient, with that weight.
    """
    moved = logprobs.detach().exp() - old.exp()
    low, high = clip_masks(moved, advantages, -clip_low, clip_high)
    r = probability_ratio(logprobs, old)
    truncated = r * (max_ratio / r.detach()).clamp(max=1)
    return LossAndClip(torch.where(low | high, 0.0, -truncated * advantages), low, high)


@PolicyLoss
def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> LossAndClip:
    """Returns -A logprobs: the plain policy gradient (Williams 1992). Nothing bounds it for off-policy batches."""
    return unclipped(-advantages * logprobs)


@PolicyLoss
def nll(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> LossAndClip:
    """Returns -A logprobs with A = 1: the loss of supervised training, on tokens that data shows and no policy sampled."""
    return unclipped(-advantages * logprobs)


def report_clip(function: Callable[..., Any]) -> Callable[..., LossAndClip]:
    """Makes any loss return a `LossAndClip`. A user's own loss reports no clipped tokens."""
    if isinstance(function, PolicyLoss):
        return function.with_clip

    def with_clip(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> LossAndClip:
        if not len(logprobs):  # a rank without sequences, whose part the function need not know
            return unclipped(logprobs)
        loss = function(logprobs, old, advantages, sequences, **options)
        require_shape("algorithm.loss", loss, len(logprobs), "token")
        return unclipped(loss)

    return with_clip


# --- building blocks --------------------------------------------------------------------------------------------------


def clip_ratio(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: float = 0.0
) -> LossAndClip:
    """Returns -min(ratio A, clip(ratio, low, high) A), and at most -dual_clip A where A < 0, unless that is 0.  [T], [T] -> [T]"""
    bounded = torch.clamp(ratio, low, high)  # type: ignore[arg-type]
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped_low, clipped_high = clip_masks(ratio, advantages, low, high)
    if dual_clip:
        beyond = (advantages < 0) & (ratio > dual_clip)
        loss, clipped_high = torch.where(beyond, -dual_clip * advantages, loss), clipped_high | beyond
    return LossAndClip(loss, clipped_low, clipped_high)


def clip_masks(value: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> tuple[Tensor, Tensor]:
    """Marks the tokens that are past the bound their advantage pushes them to.  [T], [T] -> [T], [T] bool

    Tokens with A < 0 are marked below `low`, tokens with A > 0 above `high`.
    """
    return (value < low) & (advantages < 0), (value > high) & (advantages > 0)


def unclipped(loss: Tensor) -> LossAndClip:
    """Returns a loss in which no token is clipped."""
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return LossAndClip(loss, nowhere, nowhere)


LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "advantage_clip": advantage_clip,
    "gspo": gspo,
    "dcpo": dcpo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "reinforce": reinforce,
    "nll": nll,
}
