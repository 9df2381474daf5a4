"""Attention over sequences laid end to end, for any Hugging Face decoder.

Linear layers see the flat tokens; only attention needs to know where sequences end. Given position ids alone, transformers
would build a dense [T, T] mask; here sequences of similar length are folded into a small padded block instead, causal
attention runs on the block, and the padding is dropped again. A query never sees padding: it always comes after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rlsys import exact

NAME = "rlsys_packed"
EXACT = "rlsys_packed_exact"  # the same arithmetic as an engine's, under `rollout.exact`
WIDEST = 1.25  # the longest of a block over its shortest: at most a fifth of a block is padding


@dataclass(frozen=True)
class Layout:
    """Where each block's tokens lie. For lengths [2, 1]: fold [[0, 1], [2, 2]] (one block), and back [0, 1, 2]."""

    folds: list[
        Tensor
    ]  # per block [n, L]: position in the pack of each cell; padding repeats the sequence's last token
    back: Tensor  # [T]: cell, over all blocks, of each token of the pack


def layout(lengths: list[int], device: torch.device | str = "cpu") -> Layout:
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    blocks: list[list[int]] = []
    for i in order:
        if blocks and lengths[blocks[-1][0]] <= lengths[i] * WIDEST:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    folds, back, offset = [], torch.empty(sum(lengths), dtype=torch.long), 0
    for block in blocks:
        longest = lengths[block[0]]
        start = torch.tensor([starts[i] for i in block])[:, None]
        length = torch.tensor([lengths[i] for i in block])[:, None]
        column = torch.arange(longest)[None]
        fold = start + torch.minimum(column, length - 1)
        real = column < length
        back[fold[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        folds.append(fold.to(device))
    return Layout(folds, back.to(device))


def fused(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float = 0.0) -> Tensor:
    """Causal attention of sequences of one length.  [n, H, L, D], [n, H or fewer, L, D] twice -> [n, H, L, D]"""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
    )


class Exact(torch.autograd.Function):
    """`fused`, its result computed by `exact.attend`. The gradient is that of `fused`: the same to rounding."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        assert not dropout, "exact attention has no dropout"
        ctx.save_for_backward(query, key, value)
        ctx.scaling = scaling
        (n, heads, length, size), of = query.shape, key.shape[1]
        padding = (0, 0, 0, -length % exact.KEYS)
        key, value = (F.pad(x, padding).reshape(n * of, -1, size) for x in (key, value))
        seen = torch.arange(1, length + 1).repeat(heads // of).expand(n * of, -1)
        out = exact.attend(query.reshape(n * of, -1, size), key, value, seen, scaling or size**-0.5)
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = fused(query, key, value, ctx.scaling)
        return *torch.autograd.grad(out, (query, key, value), grad), None, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    attend: Callable[[Tensor, Tensor, Tensor, float | None, float], Tensor] = fused,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, D] each -> [1, T, H, D]; `layout` travels as a keyword argument of `model(...)`."""
    assert layout is not None, "packed attention needs layout=layout(lengths)"
    if sliding_window is not None and any(fold.shape[1] > sliding_window for fold in layout.folds):
        raise ValueError(
            f"a sequence is longer than this model's sliding window ({sliding_window}), which packed attention does not have."
        )
    cells = []
    for fold in layout.folds:
        n, longest = fold.shape

        def folded(x: Tensor, fold: Tensor = fold, n: int = n, longest: int = longest) -> Tensor:
            return x[0].index_select(1, fold.flatten()).view(x.shape[1], n, longest, x.shape[3]).transpose(0, 1)

        out = attend(folded(query), folded(key), folded(value), scaling, dropout)
        cells.append(out.transpose(1, 2).reshape(n * longest, query.shape[1], -1))
    return torch.cat(cells).index_select(0, layout.back)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(EXACT, partial(packed_attention, attend=Exact.apply))
