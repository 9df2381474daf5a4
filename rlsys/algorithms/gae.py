"""Generalized advantage estimation: token-level advantages from a critic, for PPO (Schulman et al. 2015, 1506.02438).

Sequences stand end to end in flat tensors; no function loops over tokens.
"""

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    sequences: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns advantages [T], and the returns [T] that the critic learns.  rewards [T], values [T], sequences [T]

    `values[t]` is the critic's estimate before token t. δ = r + γ V(next) - V, with V(next) = 0 after the last token of
    a sequence; A_t = Σ_l (γ λ)^l δ_{t+l}; return = A + V. With γ = λ = 1, A is the sum of rewards from t on, minus V.
    `bootstrap` [T] marks last tokens after which the sequence would go on: V(next) is then V of that token, because the
    critic has not seen the state after it.
    """
    validate_inputs(rewards, values, sequences, gamma, lam)
    rewards, values = rewards.detach().float(), values.detach().float()
    following = shift_back(values, sequences, 1)
    if bootstrap is not None:
        following = torch.where(bootstrap, values, following)
    delta = rewards + gamma * following - values
    advantages = discounted_sum(delta, sequences, gamma * lam)
    return advantages, advantages + values


def validate_inputs(rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lam: float) -> None:
    """Raises `ValueError` for wrong shapes, infinite or missing numbers, and factors outside of [0, 1]."""
    shapes = [list(t.shape) for t in (rewards, values, sequences)]
    if any(s != shapes[0] for s in shapes) or rewards.dim() != 1:
        raise ValueError(f"gae: rewards, values and sequences are {', '.join(map(str, shapes))}; each must be [T].")
    for name, tensor in (("rewards", rewards), ("values", values)):
        if not torch.isfinite(tensor).all():
            index = int((~torch.isfinite(tensor)).nonzero()[0])
            raise ValueError(f"gae: {name}[{index}] is {tensor[index].item()}.")
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"gae: {name} is {factor}; it must be between 0 and 1.")


def discounted_sum(values: Tensor, sequences: Tensor, decay: float) -> Tensor:
    """Returns Σ_l decay^l values[t + l] within each sequence, by doubling the number of terms: 1, 2, 4, 8, …  [T] -> [T]"""
    total, span = values, 1
    longest = int(torch.unique_consecutive(sequences, return_counts=True)[1].max()) if len(sequences) else 0
    while span < longest:
        total = total + decay**span * shift_back(total, sequences, span)
        span *= 2
    return total


def shift_back(values: Tensor, sequences: Tensor, distance: int) -> Tensor:
    """Returns the value `distance` tokens later in the same sequence, 0 past its end.  [T] -> [T]"""
    shifted = torch.zeros_like(values)
    shifted[:-distance] = torch.where(sequences[:-distance] == sequences[distance:], values[distance:], 0.0)
    return shifted


def whiten(values: Tensor, eps: float = 1e-8) -> Tensor:
    """Scales to mean 0 and deviation 1 over all tokens; equal values become 0.  [T] -> [T]"""
    if len(values) < 2 or values.min() == values.max():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + eps)
