"""AdamW that can leave out a step."""

from collections.abc import Callable
from typing import Any

import torch


class GuardedAdamW(torch.optim.AdamW):
    """AdamW whose steps `allow_step` can turn off: DeepSpeed calls `step` itself, after it has clipped gradients.

    A step that is left out changes neither weights nor moments nor step count. DeepSpeed copies the same weights again.
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
        """Creates the moments as the first step would, because a checkpoint may be saved or loaded before it.

        torch keeps the step in host memory; a fused AdamW keeps it on the device of the tensor.
        """
        for tensor in tensors:
            self.state[tensor] = {
                "step": torch.zeros((), device=tensor.device if self.defaults["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
