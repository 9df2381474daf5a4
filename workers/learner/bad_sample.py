"""Finds the sample whose loss or gradient is not finite, for which an update is skipped."""

import math
from typing import Any

import numpy as np
import torch

from rlsys.forward.transfer import to_device
from rlsys.types import Pack


class FirstBadSample:
    """The first sample of a mini-batch whose loss, or whose loss's gradient, is not finite."""

    def __init__(self, device: Any):
        self.first = torch.full((), math.inf, device=device)

    def observe(self, pack: Pack, outputs: Any, losses: Any) -> None:
        """Checks `losses` [K], token weights included, and in the backward pass the gradient of `outputs` [K]."""
        if not pack.samples:
            return
        samples = to_device(np.repeat(pack.samples, pack.target_counts), outputs.device)

        def check(numbers: torch.Tensor) -> None:
            # No branch, so that nothing waits for the device.
            self.first = torch.where(numbers.isfinite(), math.inf, samples).min().minimum(self.first)

        check(losses.detach())
        if outputs.requires_grad:
            outputs.register_hook(check)

    def index(self) -> float:
        """Returns the sample's index in the batch, or infinity if there is none."""
        return self.first.item()
