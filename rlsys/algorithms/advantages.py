"""Advantages: how much better a sample is than expected.

    ESTIMATORS[name](rewards [N], groups [N], *, lengths=None, **options) -> [N]

Keyword arguments are options. Samples are grouped by id, never by position, and groups may have any size. An estimator
that compares samples within a group gives exactly 0 to a group of one sample and to a group of equal rewards, except
`reinforce_pp_baseline` over tokens.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.segments import Segments
from rlsys.config.options import keyword_options, validate_options


def estimator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps an estimator: validates its inputs, groups the samples, computes in double precision, returns floats."""
    name, known = function.__name__, keyword_options(function)

    @functools.wraps(function)
    def checked(rewards: Tensor, groups: Tensor, *, lengths: Tensor | None = None, **options: Any) -> Tensor:
        options = validate_options(name, options, known, numbers=("eps",))
        validate_choices(name, options)
        validate_inputs(name, rewards, groups, lengths)
        if "lengths" in known:
            options["lengths"] = lengths
        if not len(groups):
            return rewards.new_zeros(0, dtype=torch.float32)
        return function(rewards.detach().double(), Segments(groups), **options).float()

    return checked


def validate_choices(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an unknown choice among the options of the estimator `name`."""
    for option, choices in {"std": ("sample", "population", "none"), "whiten_over": ("tokens", "samples")}.items():
        if option in options and options[option] not in choices:
            raise ValueError(f"{name}: {option} is {options[option]!r}; known: {', '.join(choices)}.")


def validate_inputs(name: str, rewards: Tensor, groups: Tensor, lengths: Tensor | None) -> None:
    """Raises `ValueError` for shapes, ids, lengths or rewards that the estimator `name` cannot use."""
    if groups.dim() != 1 or rewards.shape[:1] != groups.shape or rewards.dim() > 1 + (name == "gdpo"):
        shapes = "be [N, K] and [N]" if name == "gdpo" else "both be [N]"
        raise ValueError(f"{name}: rewards {list(rewards.shape)} and groups {list(groups.shape)} must {shapes}.")
    if groups.is_floating_point():
        raise ValueError(f"{name}: groups must be integer ids; they are {groups.dtype}.")
    if lengths is not None and not (lengths.shape == groups.shape and (lengths >= 0).all()):
        shown = lengths.tolist()[:20]
        raise ValueError(f"{name}: lengths {shown} must be [{len(groups)}], one per reward, not negative.")
    if not torch.isfinite(rewards).all():
        index = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        value = rewards[tuple(index)].item()
        raise ValueError(f"{name}: rewards{index} is {value}; failed samples must leave the batch first.")


@estimator
def grpo(rewards: Tensor, groups: Segments, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """Returns (reward - group mean) / (group deviation + eps).

    Shao et al. 2024, arXiv 2402.03300. `std`: `sample` divides the sum of squares by G - 1, `population` by G; `none`
    does not divide by the deviation.
    """
    return standardize(rewards, groups, std, eps)


@estimator
def dr_grpo(rewards: Tensor, groups: Segments) -> Tensor:
    """Returns reward - group mean.

    Liu et al. 2025, arXiv 2503.20783. Without the deviation, prompts that almost always or almost never succeed weigh
    no more than others.
    """
    return center(rewards, groups)


@estimator
def rloo(rewards: Tensor, groups: Segments) -> Tensor:
    """Returns reward - mean reward of the others in its group, which is G / (G - 1) times (reward - group mean).

    Ahmadian et al. 2024, arXiv 2402.14740. The baseline does not depend on the sample, so the gradient is unbiased.
    """
    return center(rewards, groups) * groups.broadcast(groups.sizes / (groups.sizes - 1).clamp(min=1))


@estimator
def reinforce_pp(
    rewards: Tensor,
    groups: Segments,
    *,
    lengths: Tensor | None = None,
    whiten_over: str = "tokens",
    std: str = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Returns (reward - batch mean) / (batch deviation + eps): the whole batch is one group.

    Hu 2025, REINFORCE++, arXiv 2501.03262. Made for one sample per prompt, with KL in the reward (`reference.kl_in`).
    Mean and deviation are over `tokens`, so a sample counts once per token, as in verl and OpenRLHF; or over `samples`.
    The paper charges a token with the KL from that token on; here each token is charged with the KL of its whole
    completion. The expected gradient is the same.
    """
    if whiten_over == "tokens":
        return standardize_over_tokens(rewards, groups, lengths, std, eps)
    return standardize(rewards, single_group(groups), std, eps)


@estimator
def reinforce_pp_baseline(
    rewards: Tensor,
    groups: Segments,
    *,
    lengths: Tensor | None = None,
    whiten_over: str = "tokens",
    std: str = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Returns (d - batch mean of d) / (batch deviation of d + eps), with d = reward - group mean.

    Hu 2025, arXiv 2501.03262. Mean and deviation are over `tokens` or over `samples`, as in `reinforce_pp`. Over
    samples the mean of d is 0.
    """
    centered = center(rewards, groups)
    if whiten_over == "tokens":
        return standardize_over_tokens(centered, groups, lengths, std, eps)
    if std == "none":
        return centered
    return safe_divide(centered, group_deviation(centered, single_group(groups), std) + eps)


@estimator
def opo(rewards: Tensor, groups: Segments, *, lengths: Tensor | None = None) -> Tensor:
    """Returns reward - length-weighted group mean, which is close to the baseline of least variance.

    Hao et al. 2025, arXiv 2505.23585: b = Σ l r / Σ l. A group of empty completions uses the plain mean.
    """
    return subtract_weighted_mean(rewards, groups, length_weights("opo", lengths, groups))


@estimator
def grpo_passk(rewards: Tensor, groups: Segments, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """Returns (best reward - second best) / (group deviation + eps) for the best sample of a group, 0 for the others.

    Tang et al. 2025, arXiv 2503.19595: best-of-G with a leave-one-out baseline, summed over the group. It is what the
    sample adds to the group's maximum; where two samples share the best reward, neither adds anything. Dividing by the
    deviation is GRPO's addition, as in verl; `std: none` leaves it out.
    """
    best = rewards == groups.broadcast(groups.max(rewards))
    second = groups.max(rewards.masked_fill(best, -torch.inf))
    unique = groups.sum(best.double()) == 1
    gain = torch.where(best & groups.broadcast(unique & second.isfinite()), rewards - groups.broadcast(second), 0.0)
    if std == "none":
        return gain
    return safe_divide(gain, group_deviation(center(rewards, groups), groups, std) + eps)


@estimator
def gdpo(
    rewards: Tensor,
    groups: Segments,
    *,
    weights: Sequence[float] | Tensor | None = None,
    std: str = "sample",
    eps: float = 1e-6,
    whiten: bool = True,
) -> Tensor:
    """Returns the weighted sum of GRPO's advantages of each reward component.  rewards [N, K], weights [K]

    Liu et al. 2026, arXiv 2601.05242. GRPO sees only the sum of the components; here, different components with the
    same sum remain different. `whiten` divides by the deviation over the batch's samples at the end, as the paper does.
    """
    columns = rewards.reshape(len(rewards), -1)
    factors = torch.ones(columns.shape[1]) if weights is None else torch.as_tensor(weights)
    if not columns.shape[1] or factors.shape != columns.shape[1:] or not torch.isfinite(factors).all():
        raise ValueError(f"gdpo: weights {factors.tolist()} do not match rewards {list(rewards.shape)}, [N, K].")
    parts = [standardize(component, groups, std, eps) for component in columns.t().contiguous()]
    total = torch.stack(parts, 1) @ factors.to(columns)
    if not whiten:
        return total
    return safe_divide(total, group_deviation(total, single_group(groups), "sample") + eps)


@estimator
def max_rl(rewards: Tensor, groups: Segments, *, eps: float = 1e-6) -> Tensor:
    """Returns (reward - group mean) / (group mean + eps), for rewards between 0 (failure) and 1 (success).

    Tajwar et al. 2026, arXiv 2602.02710. With rewards 0 and 1 this maximizes the log-likelihood of success, expanded up
    to order G - 1.
    """
    return safe_divide(center(rewards, groups), groups.broadcast(groups.mean(rewards)) + eps)


@estimator
def remax(rewards: Tensor, groups: Segments, *, greedy: Tensor | None = None) -> Tensor:
    """Returns reward - reward of the greedy completion of the same prompt.  greedy [N]

    Li et al. 2023, arXiv 2310.10505. The training loop samples one greedy completion more per prompt. Where its reward
    failed, `greedy` is NaN and the advantage is 0.
    """
    if greedy is None or greedy.shape != rewards.shape:
        raise ValueError(
            f"remax: greedy is {greedy if greedy is None else list(greedy.shape)}; it must be [{len(rewards)}]."
        )
    if torch.isinf(greedy).any():
        raise ValueError(f"remax: greedy[{int(torch.isinf(greedy).nonzero()[0])}] is infinite.")
    return (rewards - greedy.double()).nan_to_num(0.0)


@estimator
def raw(rewards: Tensor, groups: Segments) -> Tensor:
    """Returns the reward itself: REINFORCE without a baseline (Williams 1992), unbiased and noisy."""
    return rewards


# --- building blocks --------------------------------------------------------------------------------------------------


def center(rewards: Tensor, groups: Segments) -> Tensor:
    """Subtracts the group mean.  [N] -> [N]"""
    shifted = subtract_member(rewards, groups)
    return shifted - groups.broadcast(groups.mean(shifted))


def subtract_weighted_mean(rewards: Tensor, groups: Segments, weights: Tensor) -> Tensor:
    """Subtracts the weighted group mean.  [N], [N] -> [N]"""
    shifted = subtract_member(rewards, groups)
    return shifted - groups.broadcast(groups.sum(weights * shifted) / groups.sum(weights))


def length_weights(name: str, lengths: Tensor | None, groups: Segments) -> Tensor:
    """Returns the lengths of completions as weights; equal weights for a group of empty ones.  [N] -> [N]"""
    if lengths is None:
        raise ValueError(f"{name}: lengths is None; rewards are weighted by the length of the completion.")
    return torch.where(groups.broadcast(groups.sum(lengths.double()) == 0), 1.0, lengths.double())


def subtract_member(rewards: Tensor, groups: Segments) -> Tensor:
    """Subtracts the reward of one member of each group.  [N] -> [N]

    Equal rewards become exactly 0, even where rounding would move their mean away from them.
    """
    return rewards - groups.broadcast(groups.any_member(rewards))


def standardize(rewards: Tensor, groups: Segments, std: str, eps: float) -> Tensor:
    """Returns (reward - group mean) / (group deviation + eps).  [N] -> [N]"""
    centered = center(rewards, groups)
    return centered if std == "none" else safe_divide(centered, group_deviation(centered, groups, std) + eps)


def standardize_over_tokens(values: Tensor, groups: Segments, lengths: Tensor | None, std: str, eps: float) -> Tensor:
    """Returns (value - mean) / (deviation + eps), both over all tokens of the batch, each with its sample's value.  [N] -> [N]

    A sample without tokens gets 0, unless none has any.
    """
    batch = single_group(groups)
    weights = length_weights("whiten_over tokens", lengths, batch)
    centered = torch.where(weights > 0, subtract_weighted_mean(values, batch, weights), 0.0)
    if std == "none":
        return centered
    degrees_of_freedom = (weights.sum() - int(std == "sample")).clamp(min=1)
    return safe_divide(centered, ((weights * centered.square()).sum() / degrees_of_freedom).sqrt() + eps)


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divides, with 0 / 0 = 0.  [N], [N] -> [N]"""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def group_deviation(centered: Tensor, groups: Segments, std: str) -> Tensor:
    """Returns the standard deviation of each sample's group, from centered rewards.  [N] -> [N]"""
    degrees_of_freedom = (groups.sizes - int(std == "sample")).clamp(min=1)
    return groups.broadcast((groups.sum(centered.square()) / degrees_of_freedom).sqrt())


def single_group(groups: Segments) -> Segments:
    """Returns all samples as one group."""
    return Segments.single(len(groups.ids), groups.ids.device)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "max_rl": max_rl,
    "remax": remax,
    "raw": raw,
}
