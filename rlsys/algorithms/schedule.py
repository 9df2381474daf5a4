"""The learning rate as a function of the number of updates."""

import math


def learning_rate(update: int, *, peak: float, schedule: str, warmup: int, total: int) -> float:
    """Returns the learning rate of update `update`, counted from 0.

    Rises linearly over `warmup` updates, then stays constant, or falls to 0 at `total` (linear, cosine).
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    done = min((update - warmup) / max(total - warmup, 1), 1.0)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak
