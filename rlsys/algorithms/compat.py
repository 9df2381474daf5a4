"""A function under the name and with the contract that code written for other libraries expects."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.advantages import grpo


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns GRPO's advantages and returns, which are equal, for padded tensors.  [B, L], [B, L], [B] -> [B, L], [B, L]

    The score of a response is the sum of its token rewards; `index` names its prompt. A group of one keeps its own
    reward (mean 0, deviation 1), as in the function of this name elsewhere. The training loop uses `grpo`, which gives
    such a group an advantage of 0.
    """
    if token_level_rewards.shape != response_mask.shape or len(index) != len(token_level_rewards):
        raise ValueError(
            f"compute_grpo_outcome_advantage: token_level_rewards {list(token_level_rewards.shape)}, response_mask "
            f"{list(response_mask.shape)} and index [{len(index)}] do not agree."
        )
    with torch.no_grad():
        scores = token_level_rewards.sum(-1) * 1.0  # whole-number rewards have fractional advantages
        groups = number_groups(index)
        relative = grpo(scores.cpu(), groups, std="sample" if norm_adv_by_std_in_grpo else "none", eps=epsilon)
        is_single = torch.bincount(groups)[groups] == 1
        absolute = scores.cpu().float() / (1 + epsilon if norm_adv_by_std_in_grpo else 1)
        advantages = torch.where(is_single, absolute, relative).to(scores)[:, None] * response_mask
    return advantages, advantages


def number_groups(index: Sequence[Hashable]) -> Tensor:
    """Numbers the distinct names in order of appearance. `["a", "b", "a"] -> [0, 1, 0]`"""
    numbers: dict[Hashable, int] = {}
    names = (name.item() if isinstance(name, Tensor) else name for name in index)
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.long)
