"""Attention over packed sequences, for any Hugging Face decoder.

Linear layers see the flat tokens; only attention needs to know where sequences end. From position ids alone,
transformers would build a dense [T, T] mask. Instead, pieces of similar length are copied into a small padded block,
attention runs on the block, and the padding is dropped again. A query never sees padding, because padding always comes
after it. The completions of a prompt see the keys of the prompt and their own; the prompt itself is computed once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rlsys.packs import exact
from rlsys.types import Pack

PACKED_ATTENTION = "rlsys_packed"
EXACT_PACKED_ATTENTION = "rlsys_packed_exact"  # computes in the same order as the engine, for `rollout.exact`
MAX_LENGTH_RATIO = 1.25  # longest piece of a block over its shortest: at most a fifth of a block is padding


def target_hidden_states(decoder: Any, pack: Pack, device: torch.device) -> Tensor:
    """The decoder's last hidden states at the positions that predict the targets of a pack.  [K, hidden size]"""
    output = decoder(
        input_ids=torch.tensor(pack.tokens, dtype=torch.long, device=device)[None],
        position_ids=torch.tensor(pack.positions, device=device)[None],
        use_cache=False,
        layout=build_layout(pack.lengths, pack.parent, device),
    )
    positions = torch.tensor(pack.logit_positions, dtype=torch.long, device=device)
    return output.last_hidden_state[0].index_select(0, positions)


# --- layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedPrefix:
    """Rows `first_row` to `end_row` - 1 of a block continue the same piece, which begins at `start` in the pack."""

    start: int
    first_row: int
    end_row: int


@dataclass(frozen=True)
class AttentionBlock:
    """Pieces of similar length, one per row; each row begins with the prefix that its piece continues.

    The prompt 0 1 and its completions 2 3 and 4 5 make two blocks: [[0, 1]] without prefix, and [[0, 1, 2, 3],
    [0, 1, 4, 5]] with a prefix of 2 tokens, which its rows share. Padding repeats the last token of a piece.
    """

    tokens: Tensor  # [n, prefix + L] index in the pack of the token in each cell
    prefix: int  # tokens
    shared_prefixes: list[SharedPrefix]
    mask: Tensor | None  # [L, prefix + L] the keys that a query sees; None without prefix: plain causal attention


@dataclass(frozen=True)
class Layout:
    blocks: list[AttentionBlock]
    cell_of_token: Tensor  # [T] index of each token's cell among the cells after the prefixes, block after block


def build_layout(lengths: list[int], parents: list[int], device: torch.device | str = "cpu") -> Layout:
    """Lays the pieces of a pack out in blocks. `lengths` and `parents` as in `Pack`."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    blocks, cell_of_token, offset = [], torch.empty(sum(lengths), dtype=torch.long), 0
    for pieces in group_similar(lengths, parents):
        longest = lengths[pieces[0]]
        pieces.sort(key=lambda i: (parents[i], i))
        column, length = torch.arange(longest)[None], torch.tensor([lengths[i] for i in pieces])[:, None]
        tokens = torch.tensor([starts[i] for i in pieces])[:, None] + torch.minimum(column, length - 1)
        real = column < length  # not padding
        cell_of_token[tokens[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        if prefix := prefix_length(lengths, parents[pieces[0]]):
            blocks.append(prefixed_block(tokens, prefix, [starts[parents[i]] for i in pieces], device))
        else:
            blocks.append(AttentionBlock(tokens.to(device), 0, [], None))
    return Layout(blocks, cell_of_token.to(device))


def group_similar(lengths: list[int], parents: list[int]) -> list[list[int]]:
    """Groups pieces with prefixes of the same length and with similar lengths, each group's longest piece first."""
    prefixes = [prefix_length(lengths, parent) for parent in parents]
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (prefixes[i], -lengths[i])):
        first = groups[-1][0] if groups else i
        if groups and prefixes[first] == prefixes[i] and lengths[first] <= lengths[i] * MAX_LENGTH_RATIO:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def prefix_length(lengths: list[int], parent: int) -> int:
    return 0 if parent < 0 else lengths[parent]


def prefixed_block(tokens: Tensor, prefix: int, starts: list[int], device: torch.device | str) -> AttentionBlock:
    """Puts `prefix` tokens in front of each row of `tokens` [n, L]; that of row i begins at `starts[i]` in the pack."""
    longest = tokens.shape[1]
    tokens = torch.cat([torch.tensor(starts)[:, None] + torch.arange(prefix), tokens], 1)
    rows = [starts.index(start) for start in dict.fromkeys(starts)]
    shared = [SharedPrefix(starts[row], row, end) for row, end in zip(rows, [*rows[1:], len(starts)], strict=True)]
    mask = torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(prefix)
    return AttentionBlock(tokens.to(device), prefix, shared, mask)


# --- between pack and blocks ------------------------------------------------------------------------------------------


class PackToBlocks(torch.autograd.Function):
    """Copies a pack's tokens into blocks, without or with their prefixes.  [T, F] -> per block [n, L or prefix + L, F]

    The gradient of a token is the sum over its own cell and its cells in prefixes. The gradient of padding is zero: no
    real query sees a padding key, and the output of a padding query is dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, with_prefix: bool) -> tuple[Tensor, ...]:
        ctx.layout, ctx.with_prefix = layout, with_prefix
        cells = [b.tokens if with_prefix else b.tokens[:, b.prefix :] for b in layout.blocks]
        return tuple(x.index_select(0, indices.flatten()).view(*indices.shape, -1) for indices in cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        blocks, features = ctx.layout.blocks, grads[0].shape[-1]
        prefixes = [b.prefix if ctx.with_prefix else 0 for b in blocks]
        pieces = [g[:, prefix:].reshape(-1, features) for g, prefix in zip(grads, prefixes, strict=True)]
        grad = torch.cat(pieces).index_select(0, ctx.layout.cell_of_token)
        if ctx.with_prefix:
            for block, g in zip(blocks, grads, strict=True):
                for shared in block.shared_prefixes:
                    rows = g[shared.first_row : shared.end_row, : block.prefix]
                    grad[shared.start : shared.start + block.prefix] += rows.sum(0)
        return grad, None, None


class BlocksToPack(torch.autograd.Function):
    """Copies cells back to the pack, without the padding.  [C, F] -> [T, F]"""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.count = len(cells)
        ctx.save_for_backward(cell_of_token)
        return cells.index_select(0, cell_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (cell_of_token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, grad.shape[1]).index_copy_(0, cell_of_token, grad), None


# --- attention --------------------------------------------------------------------------------------------------------


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention within a block.  [n, H, L, D], [n, H or fewer, prefix + L, D] twice -> [n, H, L, D]"""
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # never compiled, even inside compiled layers
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
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, float], Tensor] = block_attention,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function for packs.  [1, H, T, D] each -> [1, T, H, D]

    `layout` is a keyword argument of `model(...)`, which transformers passes through.
    """
    assert layout is not None, "packed attention needs layout=build_layout(lengths, parents)"
    if sliding_window is not None and any(block.tokens.shape[1] > sliding_window for block in layout.blocks):
        raise ValueError(
            f"a sequence is longer than this model's sliding window ({sliding_window}); packed attention does not "
            "implement sliding windows."
        )
    queries = heads_by_block(query, layout, with_prefix=False)
    keys, values = (heads_by_block(x, layout, with_prefix=True) for x in (key, value))
    masks = [block.mask for block in layout.blocks]
    outputs = [
        attend(*inputs, scaling, dropout).transpose(1, 2).flatten(2).flatten(0, 1)
        for inputs in zip(queries, keys, values, masks, strict=True)
    ]
    return BlocksToPack.apply(torch.cat(outputs), layout.cell_of_token).unflatten(-1, query.shape[1:4:2])[None], None


def heads_by_block(x: Tensor, layout: Layout, with_prefix: bool) -> list[Tensor]:
    """Copies queries, keys or values into blocks.  [1, H, T, D] -> per block [n, H, L or prefix + L, D]"""
    cells = PackToBlocks.apply(x[0].transpose(0, 1).flatten(1), layout, with_prefix)
    return [c.unflatten(-1, x.shape[1:4:2]).transpose(1, 2) for c in cells]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(EXACT_PACKED_ATTENTION, partial(packed_attention, attend=ExactAttention.apply))
