"""Attention over packs on GPUs where a prompt is shared, or a window is shorter than a sequence.

FlashAttention computes ragged sequences, without padding, mask or repeated heads.

Queries stay where they are in the pack. Each piece sees its own keys, and before them those of the pieces that it
continues: FlashAttention aligns causal masks at the last key, so a piece of few queries may have more keys.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlsys.forward.transfer import to_device
from rlsys.types import path_to

HALF_PRECISION = (torch.bfloat16, torch.float16)
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class RaggedKeys:
    """The keys of each piece of a pack, piece after piece: those that it continues, then itself."""

    tokens: Tensor  # [K] index in the pack of each key
    query_ends: Tensor  # [N + 1] where the queries of each piece begin, and the last end
    key_ends: Tensor  # [N + 1]
    most_queries: int
    most_keys: int


def ragged_keys(lengths: list[int], parents: list[int], device: torch.device | str) -> RaggedKeys:
    """Finds the keys of each piece. `lengths` and `parents` are as in `Pack`."""
    pieces = torch.arange(sum(lengths)).split(lengths)
    keys = [torch.cat([pieces[p] for p in (*path_to(parents, i), i)]) for i in range(len(pieces))]
    counts = [len(k) for k in keys]
    return RaggedKeys(
        to_device(torch.cat(keys), device), ends(lengths, device), ends(counts, device), max(lengths), max(counts)
    )


def ends(counts: list[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor([0, *counts]).cumsum(0).to(torch.int32), device)


def can_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Returns whether FlashAttention computes heads of this kind."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    if not (query.is_cuda and query.dtype in HALF_PRECISION and fits and not dropout):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ragged: RaggedKeys, scaling: float | None, window: int | None
) -> Tensor:
    """Attends with FlashAttention.  [H, T, D], [H or fewer, T, D] twice -> [T, H, D]"""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    keys, values = (RepeatPrefixes.apply(x, ragged.tokens) for x in (key, value))
    ends_and_lengths = (ragged.query_ends, ragged.key_ends, ragged.most_queries, ragged.most_keys)
    window_size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(query, keys, values, *ends_and_lengths, scale=scaling, window_size=window_size, **GROUPED_HEADS)
    assert isinstance(out, Tensor)
    return out


class RepeatPrefixes(torch.autograd.Function):
    """Gathers the keys or values of every piece.  [T, H, D] -> [K, H, D]

    The gradient of a shared prompt is added up in float32, for any type of the keys.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        ctx.count = len(x)
        ctx.save_for_backward(tokens)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.count, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, tokens, grad.float()).to(grad.dtype), None
