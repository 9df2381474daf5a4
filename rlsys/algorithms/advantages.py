"""Advantages: how much better a sample was than could be expected. Grouping is by id, never by position; groups may be ragged.

`ESTIMATORS[name](rewards [N], groups [N], *, lengths=None, **options) -> [N]`. Keyword arguments are options. A group of one,
or of equal rewards, teaches nothing to those who compare within a group: its advantage is exactly 0.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.segments import Segments
from rlsys.config.options import keyword_options, validate_options


def estimator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What all share: inputs checked, groups found, double precision inside, float out."""
    name, known = function.__name__, keyword_options(function)

    @functools.wraps(function)
    def checked(rewards: Tensor, groups: Tensor, *, lengths: Tensor | None = None, **options: Any) -> Tensor:
        options = validate_options(name, options, known, numbers=("eps",))
        if options.get("std", "none") not in ("sample", "population", "none"):
            raise ValueError(f"{name}: std is {options['std']!r}; known: sample, population, none.")
        if groups.dim() != 1 or rewards.shape[:1] != groups.shape or rewards.dim() > 1 + (name == "gdpo"):
            shapes = "be [N, K] and [N]" if name == "gdpo" else "both be [N]"
            raise ValueError(f"{name}: rewards {list(rewards.shape)} and groups {list(groups.shape)} must {shapes}.")
        if groups.is_floating_point():
            raise ValueError(f"{name}: groups must be integer ids; they are {groups.dtype}.")
        if lengths is not None and not (lengths.shape == groups.shape and (lengths >= 0).all()):
            told = lengths.tolist()[:20]
            raise ValueError(f"{name}: lengths {told} must be [{len(groups)}], one per reward, not negative.")
        if not torch.isfinite(rewards).all():
            at = (~torch.isfinite(rewards)).nonzero()[0].tolist()
            value = rewards[tuple(at)].item()
            raise ValueError(f"{name}: rewards{at} is {value}; failed samples must leave the batch first.")
        if "lengths" in known:
            options["lengths"] = lengths
        if not len(groups):
            return rewards.new_zeros(0, dtype=torch.float32)
        return function(rewards.detach().double(), Segments(groups), **options).float()

    return checked


@estimator
def grpo(rewards: Tensor, groups: Segments, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group deviation + eps).

    Shao et al. 2024, arXiv 2402.03300. `std`: `sample` divides the squares by G-1, `population` by G, `none` leaves the
    deviation out.
    """
    return standardize(rewards, groups, std, eps)


@estimator
def dr_grpo(rewards: Tensor, groups: Segments) -> Tensor:
    """Reward - group mean.

    Liu et al. 2025, arXiv 2503.20783: without the deviation, prompts that nearly always or never succeed weigh no more than others.
    """
    return center(rewards, groups)


@estimator
def rloo(rewards: Tensor, groups: Segments) -> Tensor:
    """Reward - mean of the others in the group, which is G/(G-1) times the distance to the group's mean.

    Ahmadian et al. 2024, arXiv 2402.14740. The baseline does not depend on the sample: the gradient is unbiased.
    """
    return center(rewards, groups) * groups.broadcast(groups.sizes / (groups.sizes - 1).clamp(min=1))


@estimator
def reinforce_pp(rewards: Tensor, groups: Segments, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """(reward - batch mean) / (batch deviation + eps): the whole batch is one group.

    Hu 2025, REINFORCE++, arXiv 2501.03262. Made for one sample per prompt; its KL belongs in the reward (`reference.kl_in`).
    There a token is charged with the KL from itself on, here with its completion's: on average of samples the gradient is the same.
    """
    return standardize(rewards, single_group(groups), std, eps)


@estimator
def reinforce_pp_baseline(rewards: Tensor, groups: Segments, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (deviation of that over the batch + eps).

    Hu 2025, arXiv 2501.03262. Distances to the group's mean have batch mean 0, so only their deviation is left to take out.
    """
    centred = center(rewards, groups)
    return centred if std == "none" else safe_divide(centred, group_deviation(centred, single_group(groups), std) + eps)


@estimator
def opo(rewards: Tensor, groups: Segments, *, lengths: Tensor | None = None) -> Tensor:
    """Reward - length-weighted mean of the group, close to the baseline of least variance.

    Hao et al. 2025, arXiv 2505.23585: b = Σ l r / Σ l. A group of empty completions has the plain mean.
    """
    if lengths is None:
        raise ValueError("opo: lengths is None; the baseline weighs rewards by completion length.")
    empty = groups.broadcast(groups.sum(lengths.double()) == 0)
    weights = torch.where(empty, 1.0, lengths.double())
    shifted = subtract_member(rewards, groups)
    return shifted - groups.broadcast(groups.sum(weights * shifted) / groups.sum(weights))


@estimator
def grpo_passk(rewards: Tensor, groups: Segments, *, std: str = "none", eps: float = 1e-6) -> Tensor:
    """Best reward - second best for the best sample of a group, 0 for the others: what it adds to the group's maximum.

    Tang et al. 2025, arXiv 2503.19595: best-of-G with a leave-one-out baseline, summed over the group. Two that share the best add nothing.
    """
    best = rewards == groups.broadcast(groups.max(rewards))
    second = groups.max(rewards.masked_fill(best, -torch.inf))
    alone = groups.sum(best.double()) == 1
    gain = torch.where(best & groups.broadcast(alone & second.isfinite()), rewards - groups.broadcast(second), 0.0)
    return gain if std == "none" else safe_divide(gain, group_deviation(center(rewards, groups), groups, std) + eps)


@estimator
def gdpo(
    rewards: Tensor,
    groups: Segments,
    *,
    weights: Sequence[float] | Tensor | None = None,
    std: str = "sample",
    eps: float = 1e-6,
    whiten: bool = False,
) -> Tensor:
    """Σ weight · GRPO's advantage of each reward component.  rewards [N, K], weights [K]

    Liu et al. 2026, arXiv 2601.05242: different sets of component rewards stay different, where GRPO sees only their sum.
    `whiten` divides by the batch's deviation at the end, as the paper does for several components.
    """
    columns = rewards.reshape(len(rewards), -1)
    factors = torch.ones(columns.shape[1]) if weights is None else torch.as_tensor(weights)
    if not columns.shape[1] or factors.shape != columns.shape[1:] or not torch.isfinite(factors).all():
        raise ValueError(f"gdpo: weights {factors.tolist()} do not match rewards {list(rewards.shape)}, [N, K].")
    parts = [standardize(component, groups, std, eps) for component in columns.t().contiguous()]
    total = torch.stack(parts, 1) @ factors.to(columns)
    return safe_divide(total, group_deviation(total, single_group(groups), "sample") + eps) if whiten else total


@estimator
def max_rl(rewards: Tensor, groups: Segments, *, eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group mean + eps); made for rewards that are shares of success.

    Tajwar et al. 2026, arXiv 2602.02710: with rewards 0 and 1 this climbs the log-likelihood of success, up to order G - 1.
    """
    return safe_divide(center(rewards, groups), groups.broadcast(groups.mean(rewards)) + eps)


@estimator
def remax(rewards: Tensor, groups: Segments, *, greedy: Tensor | None = None) -> Tensor:
    """Reward - reward of the greedy completion of the same prompt.  greedy [N]

    Li et al. 2023, arXiv 2310.10505. The loop asks for one greedy completion more per prompt. NaN where its verdict failed: advantage 0.
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
    """The reward itself: REINFORCE without a baseline (Williams 1992), unbiased and noisy."""
    return rewards


# --- parts ---------------------------------------------------------------------------------------------------------------


def center(rewards: Tensor, groups: Segments) -> Tensor:
    """Reward - group mean.  [N] -> [N]"""
    shifted = subtract_member(rewards, groups)
    return shifted - groups.broadcast(groups.mean(shifted))


def subtract_member(rewards: Tensor, groups: Segments) -> Tensor:
    """Reward - that of one of the group. Equal rewards become exactly 0, also where their mean could not be represented."""
    return rewards - groups.broadcast(groups.any_member(rewards))


def standardize(rewards: Tensor, groups: Segments, std: str, eps: float) -> Tensor:
    """(reward - mean) / (deviation + eps).  [N] -> [N]"""
    centred = center(rewards, groups)
    return centred if std == "none" else safe_divide(centred, group_deviation(centred, groups, std) + eps)


def safe_divide(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where there is no part, whatever the whole.  [N], [N] -> [N]"""
    return torch.where(part == 0, 0.0, part / whole)


def group_deviation(centred: Tensor, groups: Segments, std: str) -> Tensor:
    """Each sample's group deviation.  [N] -> [N]"""
    freedom = (groups.sizes - int(std == "sample")).clamp(min=1)
    return groups.broadcast((groups.sum(centred.square()) / freedom).sqrt())


def single_group(groups: Segments) -> Segments:
    """All samples as one group."""
    return Segments.single(len(groups.ids), groups.ids.device)


# --- the function people migrate from ------------------------------------------------------------------------------------


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as theirs.  [B, L], [B, L], [B] -> [B, L], [B, L] (advantages and returns)

    A response's score is the sum of its token rewards; `index` names its prompt. A group of one keeps its own reward
    (mean 0, deviation 1), which is why the training loop uses `grpo` instead.
    """
    if token_level_rewards.shape != response_mask.shape or len(index) != len(token_level_rewards):
        raise ValueError(
            f"compute_grpo_outcome_advantage: token_level_rewards {list(token_level_rewards.shape)}, response_mask "
            f"{list(response_mask.shape)} and index [{len(index)}] do not agree."
        )
    with torch.no_grad():
        scores = token_level_rewards.sum(-1) * 1.0  # whole-number rewards have fractional advantages
        numbers: dict[Hashable, int] = {}
        keys = (key.item() if isinstance(key, Tensor) else key for key in index)
        ids = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.long)
        relative = grpo(scores.cpu(), ids, std="sample" if norm_adv_by_std_in_grpo else "none", eps=epsilon)
        alone = torch.bincount(ids, minlength=len(numbers))[ids] == 1
        own = scores.cpu().float() / (1 + epsilon if norm_adv_by_std_in_grpo else 1)
        advantages = torch.where(alone, own, relative).to(scores)[:, None] * response_mask
    return advantages, advantages


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
