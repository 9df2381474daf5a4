"""Policy losses: per token, to minimise. Weighting and summing is not their business: see `packing.token_weights`.

`LOSSES[name](logprobs [T], old [T], advantages [T], sequences [T], **options) -> [T]`. Tokens of a sequence stand together.
`LOSSES[name].told(...)` is the same with the tokens the clip took hold of, for the metrics.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsys.algorithms.ratios import bounded, ratio
from rlsys.algorithms.segments import Segments
from rlsys.config.options import accepted, names


class Told(NamedTuple):
    loss: Tensor  # [T]
    low: Tensor  # [T] bool: held at the lower side of the clip
    high: Tensor  # [T] bool: at the upper side


class PolicyLoss:
    """A loss with what all share: inputs checked, single precision inside."""

    def __init__(self, function: Callable[..., Told]):
        functools.update_wrapper(self, function)
        self.function, self.name = function, function.__name__
        self.known = names(function)

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> Tensor:
        return self.told(logprobs, old, advantages, sequences, **options).loss

    def told(self, logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> Told:
        shapes = [list(t.shape) for t in (logprobs, old, advantages, sequences)]
        if any(s != shapes[0] for s in shapes) or logprobs.dim() != 1:
            raise ValueError(
                f"{self.name}: logprobs, old, advantages and sequences are {', '.join(map(str, shapes))}; each must be [T]."
            )
        options = accepted(self.name, options, self.known, numbers=self.known)
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
) -> Told:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7; two sides of the clip as in Yu et al. 2025 (DAPO), arXiv 2503.14476.
    `dual_clip` c > 1 bounds the loss of bad tokens by -c A: Ye et al. 2020, arXiv 1912.09729.
    """
    r = ratio(logprobs, old)
    loss = -torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    low, high = held(r, advantages, 1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"ppo_clip: dual_clip is {dual_clip}; it must be greater than 1, or None for none.")
        beyond = (advantages < 0) & (r > dual_clip)
        loss, high = torch.where(beyond, -dual_clip * advantages, loss), high | beyond
    return Told(loss, low, high)


@PolicyLoss
def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Told:
    """The clip of the sequence's ratio, s = exp(mean over its tokens of logprobs - old), the same for all its tokens.

    Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 7. The paper sums with `sequence_mean`.
    """
    segments = Segments(sequences)
    s = bounded(segments.spread(segments.mean(logprobs - old))).exp()
    loss = -torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return Told(loss, *held(s, advantages, 1 - clip_low, 1 + clip_high))


@PolicyLoss
def cispo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Told:
    """-clip(r, 1 - clip_low, 1 + clip_high) A logprobs, the clipped ratio without gradient: no token is left out.

    MiniMax 2025, arXiv 2506.13585, eq. 4 and 5. A clip_low of 1 is no lower side, as in the paper.
    """
    r = ratio(logprobs, old).detach()
    weight = r.clamp(1 - clip_low, 1 + clip_high)
    return Told(-weight * advantages * logprobs, r < 1 - clip_low, r > 1 + clip_high)


@PolicyLoss
def gmpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Told:
    """-A times the geometric mean over the sequence of r, each clipped on the side its advantage pushes to.

    Zhao et al. 2025, arXiv 2507.20673. The clip is of log r: r stays in (e^-clip_low, e^clip_high).
    """
    segments = Segments(sequences)
    log_r = bounded(logprobs - old)
    low, high = held(log_r, advantages, -clip_low, clip_high)
    clipped = torch.where(low, -clip_low, torch.where(high, clip_high, log_r))
    return Told(-advantages * segments.spread(segments.mean(clipped)).exp(), low, high)


@PolicyLoss
def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Told:
    """-(4/τ) σ(τ (r - 1)) A: a soft gate in place of the clip, τ by the sign of A.

    Gao et al. 2025, arXiv 2511.20347. On policy the gradient is the policy gradient's; away from it, it fades on both sides.
    """
    if not (tau_pos and tau_neg):
        raise ValueError(f"sapo: tau_pos is {tau_pos}, tau_neg {tau_neg}; both must be above 0.")
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio(logprobs, old) - 1)) * 4 / tau
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Told(-gate * advantages, never, never)


@PolicyLoss
def dppo_tv(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
) -> Told:
    """-r A, left out once the token's probability itself, not its ratio, has moved too far to the side A pushes to.

    Qi et al. 2026, arXiv 2602.04879, with binary total variation |π - old|: rare tokens are freer than with a clipped ratio.
    The paper measures from the policy that sampled; so does this where `old` is that policy.
    """
    moved = logprobs.detach().exp() - old.exp()
    low, high = held(moved, advantages, -clip_low, clip_high)
    return Told(torch.where(low | high, 0.0, -ratio(logprobs, old) * advantages), low, high)


@PolicyLoss
def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor) -> Told:
    """-A logprobs: the plain policy gradient (Williams 1992). Nothing holds it when the batch is not its own."""
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Told(-advantages * logprobs, never, never)


def telling(function: Callable[..., Any]) -> Callable[..., Told]:
    """Any loss as one that tells; a user's own tells of no clip."""
    if isinstance(function, PolicyLoss):
        return function.told

    def told(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> Told:
        loss = function(logprobs, old, advantages, sequences, **options)
        never = torch.zeros_like(advantages, dtype=torch.bool)
        return Told(loss, never, never)

    return told


# --- parts ---------------------------------------------------------------------------------------------------------------


def held(value: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
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
