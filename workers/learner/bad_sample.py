"""Which sample made an update useless."""

import math
from typing import Any

import numpy as np
import torch

from rlsys.types import Pack


class FirstBadSample:
    """The first sample of a mini-batch, by its index in the batch, whose loss or whose loss's gradient is not finite."""

    def __init__(self, device: Any):
        self.first = torch.full((), math.inf, device=device)

    def observe(self, pack: Pack, answers: Any, losses: Any) -> None:
        """`losses` [K], weights included, come from `answers` [K], whose gradient is looked at when it is there."""
        if not pack.samples:
            return
        samples = torch.tensor(np.repeat(pack.samples, pack.target_counts), device=answers.device)

        def look(numbers: torch.Tensor) -> None:
            # No branch: nothing waits for the device.
            self.first = torch.where(numbers.isfinite(), math.inf, samples).min().minimum(self.first)

        look(losses.detach())
        if answers.requires_grad:
            answers.register_hook(look)

    def index(self) -> float:
        """Infinity: none."""
        return self.first.item()
