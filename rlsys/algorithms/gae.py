"""Token-level advantages from a critic, for PPO (Schulman et al. 2015, arXiv 1506.02438). Sequences stand end to end, no loops."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, sequences: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Advantages [T] and the returns [T] that the critic is to learn.  rewards [T], values [T], sequences [T]

    `values[t]` is the critic's estimate before token t. δ = r + γ V(next) - V, where nothing follows a sequence's last token;
    A_t = Σ (γ λ)^l δ_{t+l};  return = A + V. With γ = λ = 1 it is the reward still to come, less the estimate.
    """
    shapes = [list(t.shape) for t in (rewards, values, sequences)]
    if any(s != shapes[0] for s in shapes) or rewards.dim() != 1:
        raise ValueError(f"gae: rewards, values and sequences are {', '.join(map(str, shapes))}; each must be [T].")
    for name, tensor in (("rewards", rewards), ("values", values)):
        if not torch.isfinite(tensor).all():
            at = int((~torch.isfinite(tensor)).nonzero()[0])
            raise ValueError(f"gae: {name}[{at}] is {tensor[at].item()}.")
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise ValueError(f"gae: {name} is {share}; it must be between 0 and 1.")
    rewards, values = rewards.detach().float(), values.detach().float()
    delta = rewards + gamma * shift_back(values, sequences, 1) - values
    advantages = discounted_sum(delta, sequences, gamma * lam)
    return advantages, advantages + values


def discounted_sum(amounts: Tensor, sequences: Tensor, decay: float) -> Tensor:
    """Σ over l of decay^l amounts[t + l], within each sequence, by doubling: 1 term, 2, 4, 8, …  [T] -> [T]"""
    total, span = amounts, 1
    longest = int(torch.unique_consecutive(sequences, return_counts=True)[1].max()) if len(sequences) else 0
    while span < longest:
        total = total + decay**span * shift_back(total, sequences, span)
        span *= 2
    return total


def shift_back(values: Tensor, sequences: Tensor, distance: int) -> Tensor:
    """The value `distance` tokens later in the same sequence, 0 past its end.  [T] -> [T]"""
    moved = torch.zeros_like(values)
    moved[:-distance] = torch.where(sequences[:-distance] == sequences[distance:], values[distance:], 0.0)
    return moved


def whiten(values: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean 0 and deviation 1 over all tokens; equal values become 0.  [T] -> [T]"""
    if len(values) < 2 or values.min() == values.max():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + eps)
