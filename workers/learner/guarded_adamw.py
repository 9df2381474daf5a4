"""AdamW that steps only when it was told that the update is good."""

from collections.abc import Callable
from typing import Any

import torch


class GuardedAdamW(torch.optim.AdamW):
    """DeepSpeed calls `step` itself, once per flat tensor, after it has clipped the gradients; `begin` is said once before.

    A step that is left out leaves weights, moments and step count as they were, and DeepSpeed copies the same weights anew.
    """

    allowed, stepped = True, False

    def allow_step(self, good: bool) -> None:
        self.allowed, self.stepped = good, False

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        if self.allowed:
            self.stepped = True
            return super().step(closure)
        return None

    def create_moments(self, tensors: list[torch.Tensor]) -> None:
        """Makes the moments of these tensors now, as the first step would: there may be a checkpoint before it, or never a step."""
        for tensor in tensors:
            self.state[tensor] = {
                "step": torch.tensor(0.0),  # in host memory, as torch has it
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
