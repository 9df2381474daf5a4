"""AdamW that can leave out a step."""

from collections.abc import Callable
from typing import Any

import torch


class GuardedAdamW(torch.optim.AdamW):
    """AdamW under DeepSpeed, which calls `step` itself, once per flat tensor, after it has clipped the gradients.

    `allow_step` decides beforehand. A step that is left out changes neither weights nor moments nor step count, and DeepSpeed
    copies the same weights again.
    """

    allowed, stepped = True, False

    def allow_step(self, allowed: bool) -> None:
        """Decides about the steps of the next update."""
        self.allowed, self.stepped = allowed, False

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        if self.allowed:
            self.stepped = True
            return super().step(closure)
        return None

    def create_moments(self, tensors: list[torch.Tensor]) -> None:
        """Creates the moments now, as the first step would: a checkpoint may come before it, and every step may be left out."""
        for tensor in tensors:
            self.state[tensor] = {
                "step": torch.tensor(0.0),  # in host memory, as torch keeps it
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
