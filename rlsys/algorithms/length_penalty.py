"""How the length of a completion changes its reward: a penalty near the maximum length, or a mean per token."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Returns 0 up to `longest - buffer` tokens, then falling linearly to -factor at `longest`.  [N] -> [N]

    Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"overlong.penalty: buffer is {buffer}; it must be between 1 and longest ({longest}).")
    if not factor >= 0:
        raise ValueError(f"overlong.penalty: factor is {factor}; it must be 0 or more.")
    return -factor * ((lengths - (longest - buffer)).float() / buffer).clamp(0, 1)


def reward_per_token(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Returns each reward, or each of its K components, over its completion's tokens. Empty counts as one.  [N] or [N, K], [N]"""
    return (rewards.t() / lengths.clamp(min=1)).t()
