"""Attention on the padded blocks of a `Layout`: on CPUs always, on GPUs where neither FlashAttention nor FlexAttention computes it."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlsys.forward import exact
from rlsys.forward.layout import AttentionBlock, BlocksToPack, Layout, PackToBlocks


class BlockKernel(Protocol):
    """Attention within a block.  [n, H, L, D], [n, H or fewer, prefix + L, D] twice -> [n, H, L, D]"""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float, /
    ) -> Tensor: ...


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None,
    dropout: float,
    window: int | None,
    kernel: BlockKernel,
) -> Tensor:
    """Attends block by block.  [1, H, T, D], [1, H or fewer, T, D] twice -> [1, T, H, D]"""
    queries = heads_by_block(query, layout, with_prefix=False)
    keys, values = (heads_by_block(x, layout, with_prefix=True) for x in (key, value))
    masks = [window_mask(block, window) for block in layout.blocks]
    outputs = [
        kernel(*inputs, scaling, dropout).transpose(1, 2).flatten(2).flatten(0, 1)
        for inputs in zip(queries, keys, values, masks, strict=True)
    ]
    heads = (query.shape[1], value.shape[3])
    packed: Tensor = BlocksToPack.apply(torch.cat(outputs), layout.cell_of_token)
    return packed.unflatten(-1, heads)[None]


def heads_by_block(x: Tensor, layout: Layout, with_prefix: bool) -> list[Tensor]:
    """Copies queries, keys or values into blocks.  [1, H, T, D] -> per block [n, H, L or prefix + L, D]"""
    cells = PackToBlocks.apply(x[0].transpose(0, 1).flatten(1), layout, with_prefix)
    return [c.unflatten(-1, x.shape[1:4:2]).transpose(1, 2) for c in cells]


def is_windowed(block: AttentionBlock, window: int | None) -> bool:
    """Returns whether some queries of a block do not see all keys before them."""
    return window is not None and block.tokens.shape[1] > window


def window_mask(block: AttentionBlock, window: int | None) -> Tensor | None:
    """Returns the keys that each query of a block sees, [L, prefix + L]; None: itself and all before it."""
    if window is None or not is_windowed(block, window):
        return block.mask
    return block.causal_mask().triu(block.prefix - window + 1)


# --- within a block ---------------------------------------------------------------------------------------------------


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attends within a block.  [n, H, L, D], [n, H or fewer, prefix + L, D] twice -> [n, H, L, D]"""
    # With a mask or in float32, only a kernel that stores all scores accepts fewer key heads than query heads on a GPU.
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes `block_attention` with a soft cap of scores, or with sinks: one more score per head, which takes no value.

    The scores are in memory, and are computed again for gradients.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    arguments = (query, key, value, mask, sinks, scaling, softcap, dropout)
    output: Tensor = checkpoint(weigh_values, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
    return output


def weigh_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Returns softmax([cap tanh(q kᵀ scaling / cap), sinks]) v, without the weights of the sinks."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


class ExactAttention(torch.autograd.Function):
    """`block_attention`, but with the result of `exact.attend`. The two are equal up to rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        assert not dropout, "exact attention has no dropout"
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scaling = mask, scaling
        (n, heads, length, size), kv_heads, keys = query.shape, key.shape[1], key.shape[2]
        padding = (0, 0, 0, -keys % exact.KEY_BLOCK)
        key, value = (F.pad(x, padding).reshape(n * kv_heads, -1, size) for x in (key, value))
        seen = torch.arange(keys - length + 1, keys + 1).repeat(heads // kv_heads).expand(n * kv_heads, -1)
        out = exact.attend(query.reshape(n * kv_heads, -1, size), key, value, seen, scaling or size**-0.5)
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = block_attention(query, key, value, ctx.mask, ctx.scaling)
        return *torch.autograd.grad(out, (query, key, value), grad), None, None, None
