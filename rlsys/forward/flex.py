"""Attention over packs on GPUs where a layer has a soft cap or sinks: FlexAttention, which never stores the scores.

Queries and keys stay where they are in the pack, and a shared prompt is there once. A mask function says which keys a
query sees: its own sequence's, and those of the pieces that it continues. Pairs of blocks in which no query sees a key
are left out, and blocks that are seen whole need no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rlsys.forward.transfer import to_device
from rlsys.types import path_to, prefixes

BLOCK = 128  # tokens; what the kernels compute at a time
NO_WINDOW = 1 << 30

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> whether the query sees the key


@dataclass(frozen=True)
class Paths:
    """Where the sequences of a pack run: `lengths` and `parents` of its pieces as in `Pack`, and the same per token."""

    lengths: list[int]
    parents: list[int]
    piece: Tensor  # [T]
    last: Tensor  # [T] the last piece that continues a token's piece, itself if none does: all between continue it too
    position: Tensor  # [T] in the token's sequence
    masks: dict[int | None, BlockMask] = field(default_factory=dict)  # by window; layers of a kind share one

    def mask(self, window: int | None) -> BlockMask:
        if window not in self.masks:
            self.masks[window] = block_mask(self, window)
        return self.masks[window]


def build_paths(lengths: list[int], parents: list[int], device: torch.device | str) -> Paths:
    counts = torch.tensor(lengths)
    before = torch.tensor(prefixes(lengths, parents))
    piece = torch.arange(len(lengths)).repeat_interleave(counts, output_size=sum(lengths))
    position = torch.arange(len(piece)) - (counts.cumsum(0) - counts - before)[piece]
    last = torch.tensor(last_branches(parents))[piece]
    piece, last, position = (to_device(column.int(), device) for column in (piece, last, position))
    return Paths(lengths, parents, piece, last, position)


def last_branches(parents: list[int]) -> list[int]:
    """Returns the last piece that each piece is continued by, over any number of others.  [P] -> [P]"""
    last = list(range(len(parents)))
    for piece in reversed(range(len(parents))):
        if (parent := parents[piece]) >= 0:
            last[parent] = max(last[parent], last[piece])
    return last


def can_flex(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Returns whether its kernels compute heads of this kind."""
    return query.is_cuda and not dropout and min(query.shape[-1], value.shape[-1]) >= 16


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Paths,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends with FlexAttention.  [1, H, T, D], [1, H or fewer, T, D] twice -> [1, T, H, D]

    A sink is one more score of a softmax, without a value: it takes a share of the weights from all keys alike.
    """
    kernel = compiled_kernel() if query.is_cuda else flex_attention
    result = kernel(
        query,
        key,
        value,
        score_mod=cap_scores(softcap) if softcap is not None else None,
        block_mask=paths.mask(window),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        return_aux=AuxRequest(lse=True) if sinks is not None else None,
    )
    if sinks is None:
        return result.transpose(1, 2)  # type: ignore[no-any-return]
    out, aux = result
    out = out * torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


@cache
def compiled_kernel() -> Any:
    """Compiles for the first pack's length, and at the next length for all. `dynamic=True` would make a tensor of a cap.

    It raises where it would otherwise store all scores.
    """
    torch._inductor.config.compile_threads = 1  # processes that compile would stay
    torch._dynamo.config.recompile_limit = 64  # of 8; calls differ by gradients, length, head size and options
    return torch.compile(flex_attention, fullgraph=True)


def cap_scores(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_function(paths: Paths, window: int | None) -> Sees:
    piece, last, position = paths.piece, paths.last, paths.position
    reach = torch.tensor(window or NO_WINDOW, dtype=torch.int32, device=piece.device)  # a number would be compiled in

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = position[query] - position[key]
        on_path = (piece[key] <= piece[query]) & (piece[query] <= last[key])
        return on_path & (distance >= 0) & (distance < reach)

    return sees


def block_mask(paths: Paths, window: int | None) -> BlockMask:
    tokens, device = len(paths.piece), paths.piece.device
    partly, whole = (
        (seen.sum(1), seen.int().argsort(dim=1, descending=True, stable=True))
        for seen in seen_blocks(paths.lengths, paths.parents, window)
    )
    counts, blocks, full_counts, full_blocks = (to_device(x.int()[None, None], device) for x in (*partly, *whole))
    mask: BlockMask = BlockMask.from_kv_blocks(
        counts,
        blocks,
        full_counts,
        full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(paths, window),
        seq_lengths=(tokens, tokens),
    )
    return mask


def seen_blocks(lengths: list[int], parents: list[int], window: int | None) -> tuple[Tensor, Tensor]:
    """Returns the blocks of keys that some queries of a block see, and those that all of them see whole.  [B, B] twice"""
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    count = -(-ends[-1] // BLOCK)
    some, whole = (torch.zeros(count, count, dtype=torch.bool) for _ in range(2))
    before = prefixes(lengths, parents)
    for i in range(len(lengths)):
        rows, first_query, last_query, rows_inside = spans(starts[i], ends[i], before[i])
        for j in (i, *path_to(parents, i)):
            columns, first_key, last_key, columns_inside = spans(starts[j], ends[j], before[j])
            nearest, farthest = first_query[:, None] - last_key, last_query[:, None] - first_key
            reach, inside = window or NO_WINDOW, rows_inside[:, None] & columns_inside
            some[rows, columns] |= (farthest >= 0) & (nearest < reach)
            whole[rows, columns] |= inside & (nearest >= 0) & (farthest < reach)
    return some & ~whole, whole


def spans(start: int, end: int, offset: int) -> tuple[slice, Tensor, Tensor, Tensor]:
    """Returns the blocks that tokens `start` to `end` - 1 of a pack fall into, the first and last position that each has.

    Also whether a block has no other tokens. `offset` is the position of the first token.
    """
    blocks = torch.arange(start // BLOCK, -(-end // BLOCK))
    first, last = (blocks * BLOCK).clamp(min=start), (blocks * BLOCK + BLOCK).clamp(max=end)
    position = offset - start
    return slice(start // BLOCK, -(-end // BLOCK)), first + position, last - 1 + position, last - first == BLOCK
