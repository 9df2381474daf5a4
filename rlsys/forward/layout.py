"""Lays the sequences of a pack out in padded blocks, and brings the cells of blocks back to the pack.

Linear layers see the flat tokens of a pack; only modules that mix tokens need to know where sequences end. For these,
pieces of similar length are copied into a small padded block, which is computed as a batch, and the padding is dropped
again. Padding comes after a piece, so a causal module never brings it to a real token. A piece that continues others
begins with a copy of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlsys.forward.flash import RaggedKeys, ragged_keys
from rlsys.forward.flex import Paths, build_paths
from rlsys.forward.sequence_parallel import ALONE, SequenceGroup
from rlsys.forward.transfer import to_device
from rlsys.types import path_to, prefixes

MAX_LENGTH_RATIO = 1.25  # longest piece of a block over its shortest: at most a fifth of a block is padding


@dataclass(frozen=True)
class SharedPrefix:
    """Rows `first_row` to `end_row` - 1 of a block continue the same pieces, which lie at `spans` in the pack."""

    spans: tuple[tuple[int, int], ...]  # (start, end) of each, the first one first
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

    @cached_property
    def mask(self) -> Tensor | None:
        """The keys that each query sees, [L, prefix + L]; None without prefix: plain causal attention."""
        return self.causal_mask() if self.prefix else None

    def causal_mask(self) -> Tensor:
        """Lets each query see its own key and all before it."""
        keys = self.tokens.shape[1]
        mask = torch.ones(keys - self.prefix, keys, dtype=torch.bool, device=self.tokens.device)
        return mask.tril(self.prefix)


@dataclass(frozen=True)
class Layout:
    blocks: list[AttentionBlock]
    cell_of_token: Tensor  # [T] index of each token's cell among the cells after the prefixes, block after block
    lengths: list[int]  # of the pieces
    parents: list[int]
    ragged_keys: RaggedKeys | None = None  # on GPUs, for FlashAttention
    group: SequenceGroup = ALONE  # ranks that attend to the pack together

    @cached_property
    def paths(self) -> Paths:
        return build_paths(self.lengths, self.parents, self.cell_of_token.device)


def build_layout(
    lengths: list[int], parents: list[int], device: torch.device | str = "cpu", group: SequenceGroup = ALONE
) -> Layout:
    """Lays the pieces of a pack out in blocks. `lengths` and `parents` as in `Pack`."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    blocks, cell_of_token, offset = [], torch.empty(sum(lengths), dtype=torch.long), 0
    before = prefixes(lengths, parents)
    for pieces in group_similar(lengths, before):
        longest = lengths[pieces[0]]
        pieces.sort(key=lambda i: (parents[i], i))
        column, length = torch.arange(longest)[None], torch.tensor([lengths[i] for i in pieces])[:, None]
        tokens = torch.tensor([starts[i] for i in pieces])[:, None] + torch.minimum(column, length - 1)
        real = column < length  # not padding
        cell_of_token[tokens[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        if before[pieces[0]]:
            paths = [tuple((starts[p], starts[p] + lengths[p]) for p in path_to(parents, i)) for i in pieces]
            blocks.append(prefixed_block(tokens, before[pieces[0]], paths, device))
        else:
            blocks.append(AttentionBlock(to_device(tokens, device), 0, []))
    ragged = ragged_keys(lengths, parents, device) if torch.device(device).type == "cuda" else None
    return Layout(blocks, to_device(cell_of_token, device), lengths, parents, ragged, group)


def group_similar(lengths: list[int], before: list[int]) -> list[list[int]]:
    """Groups pieces with prefixes of the same length and with similar lengths, each group's longest piece first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (before[i], -lengths[i])):
        first = groups[-1][0] if groups else i
        if groups and before[first] == before[i] and lengths[first] <= lengths[i] * MAX_LENGTH_RATIO:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def prefixed_block(
    tokens: Tensor, prefix: int, paths: list[tuple[tuple[int, int], ...]], device: torch.device | str
) -> AttentionBlock:
    """Puts `prefix` tokens in front of each row of `tokens` [n, L]; those of row i lie at the spans `paths[i]` of the pack."""
    rows = [paths.index(path) for path in dict.fromkeys(paths)]
    shared = [SharedPrefix(paths[row], row, end) for row, end in zip(rows, [*rows[1:], len(paths)], strict=True)]
    before = [torch.cat([torch.arange(*span) for span in s.spans]).expand(s.end_row - s.first_row, -1) for s in shared]
    return AttentionBlock(to_device(torch.cat([torch.cat(before), tokens], 1), device), prefix, shared)


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
                    total, at = g[shared.first_row : shared.end_row, : block.prefix].sum(0), 0
                    for start, end in shared.spans:
                        grad[start:end] += total[at : at + end - start]
                        at += end - start
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
