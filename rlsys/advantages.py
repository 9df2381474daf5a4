"""Advantages: how much better a sample was than its group. Grouping is by id, never by position; groups may be ragged."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


def grpo(
    rewards: Tensor, groups: Tensor, *, lengths: Tensor | None = None, std: str = "sample", eps: float = 1e-6
) -> Tensor:
    """(reward - group mean) / (group deviation + eps).  [N], [N] -> [N]

    Shao et al. 2024, arXiv 2402.03300. `std`: `sample` divides the squares by G-1, `population` by G, `none` leaves the
    deviation out (Liu et al. 2025, arXiv 2503.20783). A group of one, or of equal rewards, teaches nothing: advantage 0.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"grpo: std is {std!r}; known: sample, population, none.")
    centred, count, ids = _centre(rewards, groups, "grpo")
    if std == "none":
        return centred
    squares = torch.zeros_like(count).index_add_(0, ids, centred.square())
    variance = squares / (count - int(std == "sample")).clamp(min=1)
    return centred / (variance.sqrt() + eps)[ids]


def _centre(rewards: Tensor, groups: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean [N], group sizes [M], and dense group ids [N]."""
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"{name}: rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [N].")
    rewards = rewards.float()
    if not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0, 0])
        raise ValueError(f"{name}: rewards[{bad}] is {rewards[bad].item()}; failed samples must leave the batch first.")
    unique, ids = torch.unique(groups, return_inverse=True)
    count = torch.zeros(len(unique)).index_add_(0, ids, torch.ones_like(rewards))
    mean = torch.zeros(len(unique)).index_add_(0, ids, rewards) / count
    centred = rewards - mean[ids]
    # Equal rewards must give exactly 0, also where their mean is not exactly representable.
    highest = torch.full((len(unique),), -torch.inf).scatter_reduce_(0, ids, rewards, "amax")
    lowest = torch.full((len(unique),), torch.inf).scatter_reduce_(0, ids, rewards, "amin")
    return torch.where((highest == lowest)[ids], 0.0, centred), count, ids


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """The function people migrate from, same contract.  [B, L], [B, L], [B] -> [B, L], [B, L] (advantages and returns)

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
        names: dict[Hashable, int] = {}
        keys = (key.item() if isinstance(key, Tensor) else key for key in index)
        ids = torch.tensor([names.setdefault(key, len(names)) for key in keys], dtype=torch.long)
        relative = grpo(scores.cpu(), ids, std="sample" if norm_adv_by_std_in_grpo else "none", eps=epsilon)
        alone = torch.bincount(ids, minlength=len(names))[ids] == 1
        own = scores.cpu().float() / (1 + epsilon if norm_adv_by_std_in_grpo else 1)
        advantages = torch.where(alone, own, relative).to(scores)[:, None] * response_mask
    return advantages, advantages


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
}
