"""Layouts of packs without data: computed from real numbers, then moved to a device as tensors of the same sizes."""

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rlsys.forward import context, layout

build_real_layout = layout.build_layout


def install(device: str) -> None:
    """Decoders get their layouts from here, with what FlashAttention needs."""

    def build_layout(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            real = build_real_layout(*arguments[:2])
            ragged = layout.ragged_keys(*arguments[:2], "cpu")
        return fake_copy(replace(real, ragged_keys=ragged), device)

    context.build_layout = build_layout  # type: ignore[attr-defined]


def fake_copy(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, list):
        return [fake_copy(item, device) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        copies = {name: fake_copy(getattr(value, name), device) for name in value.__dataclass_fields__}
        return value.__class__(**copies)
    return value
