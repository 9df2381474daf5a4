"""Copies numbers of a pack to the device that computes with it."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor on the device.

    CUDA copies from usual memory only after all work before it, and the host waits. Pinned memory is copied later.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
