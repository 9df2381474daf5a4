"""The reward that a completion loses for coming near the maximum length."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float = 1.0) -> Tensor:
    """0 up to `longest - buffer` tokens, then falling linearly to -factor at `longest`.  [N] -> [N]

    Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"overlong.penalty: buffer is {buffer}; it must be between 1 and longest ({longest}).")
    if not factor >= 0:
        raise ValueError(f"overlong.penalty: factor is {factor}; it must be 0 or more.")
    return -factor * ((lengths - (longest - buffer)).float() / buffer).clamp(0, 1)
