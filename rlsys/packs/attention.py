"""Attention over pieces of sequences laid end to end, for any Hugging Face decoder.

Linear layers see the flat tokens; only attention needs to know where sequences end. Given position ids alone, transformers
would build a dense [T, T] mask; here pieces of similar length are folded into a small padded block instead, attention runs on
the block, and the padding is dropped again. A query never sees padding: it always comes after it. The completions of a prompt
see the prompt's keys and their own; the prompt itself is computed once.
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
EXACT_PACKED_ATTENTION = "rlsys_packed_exact"  # the same arithmetic as an engine's, under `rollout.exact`
MAX_LENGTH_RATIO = 1.25  # the longest of a block over its shortest: at most a fifth of a block is padding


def target_hidden_states(decoder: Any, pack: Pack, device: torch.device) -> Tensor:
    """What the decoder thinks where it predicts the targets of a pack.  [K, hidden size]"""
    found = decoder(
        input_ids=torch.tensor(pack.tokens, dtype=torch.long, device=device)[None],
        position_ids=torch.tensor(pack.positions, device=device)[None],
        use_cache=False,
        layout=build_layout(pack.lengths, pack.parent, device),
    )
    return found.last_hidden_state[0].index_select(
        0, torch.tensor(pack.logit_positions, dtype=torch.long, device=device)
    )


@dataclass(frozen=True)
class AttentionBlock:
    """Pieces of similar length that continue equally many tokens.

    Prompt 0 1 and its completions 2 3 and 4 5 make two blocks: [[0, 1]] with nothing before, and [[0, 1, 2, 3], [0, 1, 4, 5]] with
    2 before, whose rows are one family. Padding repeats a piece's last token.
    """

    tokens: Tensor  # [n, before + L] place in the pack of the token in each cell
    prefix: int
    shared_prefixes: list[
        tuple[int, int, int]
    ]  # (place of the first token, row, row behind): rows that continue the same piece
    mask: Tensor | None  # [L, before + L] the keys that a query sees; None: nothing is before, plain causal attention


@dataclass(frozen=True)
class Layout:
    blocks: list[AttentionBlock]
    cell_of_token: Tensor  # [T] the cell of each token, among the blocks' own cells end to end: those behind `before`


def build_layout(lengths: list[int], after: list[int], device: torch.device | str = "cpu") -> Layout:
    """The blocks of a pack of such pieces: see `Pack`."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    before = [0 if a < 0 else lengths[a] for a in after]
    alike: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (before[i], -lengths[i])):
        first = alike[-1][0] if alike else i
        if alike and before[first] == before[i] and lengths[first] <= lengths[i] * MAX_LENGTH_RATIO:
            alike[-1].append(i)
        else:
            alike.append([i])
    blocks, back, offset = [], torch.empty(sum(lengths), dtype=torch.long), 0
    for pieces in alike:
        longest, prefix = lengths[pieces[0]], before[pieces[0]]
        pieces.sort(key=lambda i: (after[i], i))
        column, length = torch.arange(longest)[None], torch.tensor([lengths[i] for i in pieces])[:, None]
        tokens = torch.tensor([starts[i] for i in pieces])[:, None] + torch.minimum(column, length - 1)
        real = column < length
        back[tokens[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        families, mask = [], None
        if prefix:
            parents = [after[i] for i in pieces]
            tokens = torch.cat([torch.tensor([starts[a] for a in parents])[:, None] + torch.arange(prefix), tokens], 1)
            rows = [parents.index(a) for a in dict.fromkeys(parents)]
            families = [
                (starts[parents[row]], row, end) for row, end in zip(rows, [*rows[1:], len(pieces)], strict=True)
            ]
            mask = torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(prefix)
        blocks.append(AttentionBlock(tokens.to(device), prefix, families, mask))
    return Layout(blocks, back.to(device))


class PackToBlocks(torch.autograd.Function):
    """What the cells of each block hold, own cells only or all.  [T, F] -> per block [n, L, F], or [n, before + L, F]

    A token's gradient is that of its own cell, and of those where its completions see it. That of padding is zero: nothing
    real sees a padding key, and what a padding query finds is dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, everything: bool) -> tuple[Tensor, ...]:
        ctx.layout, ctx.everything = layout, everything
        folds = [b.tokens if everything else b.tokens[:, b.prefix :] for b in layout.blocks]
        return tuple(x.index_select(0, fold.flatten()).view(*fold.shape, -1) for fold in folds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        blocks, features = ctx.layout.blocks, grads[0].shape[-1]
        before = [b.prefix if ctx.everything else 0 for b in blocks]
        own = [g[:, p:].reshape(-1, features) for g, p in zip(grads, before, strict=True)]
        found = torch.cat(own).index_select(0, ctx.layout.cell_of_token)
        if ctx.everything:
            for block, g in zip(blocks, grads, strict=True):
                for start, row, end in block.shared_prefixes:
                    found[start : start + block.prefix] += g[row:end, : block.prefix].sum(0)
        return found, None, None


class BlocksToPack(torch.autograd.Function):
    """From own cells back to the pack, without the padding.  [C, F] -> [T, F]"""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, back: Tensor) -> Tensor:
        ctx.count = len(cells)
        ctx.save_for_backward(back)
        return cells.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, grad.shape[1]).index_copy_(0, back, grad), None


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention within a block.  [n, H, L, D], [n, H or fewer, before + L, D] twice -> [n, H, L, D]"""
    # On a GPU only the plain kernel, which keeps all scores, would take fewer keys than queries together with one of these.
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
    """`fused`, its result computed by `exact.attend`. The gradient is that of `fused`: the same to rounding."""

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
        (n, heads, length, size), of, keys = query.shape, key.shape[1], key.shape[2]
        padding = (0, 0, 0, -keys % exact.KEY_BLOCK)
        key, value = (F.pad(x, padding).reshape(n * of, -1, size) for x in (key, value))
        seen = torch.arange(keys - length + 1, keys + 1).repeat(heads // of).expand(n * of, -1)
        out = exact.attend(query.reshape(n * of, -1, size), key, value, seen, scaling or size**-0.5)
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = block_attention(query, key, value, ctx.mask, ctx.scaling)
        return *torch.autograd.grad(out, (query, key, value), grad), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # where layers are compiled, it stays as it is
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
    """[1, H, T, D] each -> [1, T, H, D]; `layout` travels as a keyword argument of `model(...)`."""
    assert layout is not None, "packed attention needs layout=layout(lengths, after)"
    if sliding_window is not None and any(block.tokens.shape[1] > sliding_window for block in layout.blocks):
        raise ValueError(
            f"a sequence is longer than this model's sliding window ({sliding_window}), which packed attention does not have."
        )

    def folded(x: Tensor, everything: bool) -> list[Tensor]:
        """Per block [n, H, L or before + L, D]."""
        heads = x.shape[1:4:2]
        cells = PackToBlocks.apply(x[0].transpose(0, 1).flatten(1), layout, everything)
        return [c.unflatten(-1, heads).transpose(1, 2) for c in cells]

    queries, keys, values = folded(query, False), folded(key, True), folded(value, True)
    masks = [block.mask for block in layout.blocks]
    found = [
        attend(*inputs, scaling, dropout).transpose(1, 2).flatten(2).flatten(0, 1)
        for inputs in zip(queries, keys, values, masks, strict=True)
    ]
    return BlocksToPack.apply(torch.cat(found), layout.cell_of_token).unflatten(-1, query.shape[1:4:2])[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(EXACT_PACKED_ATTENTION, partial(packed_attention, attend=ExactAttention.apply))
