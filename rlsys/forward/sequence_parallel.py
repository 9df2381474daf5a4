"""Sequence parallelism (Ulysses, arXiv 2309.14509): a group of k ranks computes each pack together.

Every rank has all layers and a share of the pack's tokens. Only attention mixes tokens. There the ranks exchange tokens
for heads, so that each attends with a part of the heads over the whole pack, and exchange back. Log-probs are computed by
the rank that has the token, and then gathered, because losses look at whole sequences.

    a pack a b c d e with 4 heads and k = 2; the last share is padded
    rank 0   tokens a b c   heads 0 1 2 3      ⇄      tokens a b c d e   heads 0 1
    rank 1   tokens d e ·   heads 0 1 2 3      ⇄      tokens a b c d e   heads 2 3
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that compute a pack together, seen from one of them."""

    rank: int = 0
    ranks: int = 1
    all_to_all: Callable[[Tensor], Tensor] = lambda x: x  # row i of [ranks, …] goes to rank i; has gradients
    all_reduce: Callable[[Tensor], object] = lambda x: None  # adds up in place

    def share_length(self, tokens: int) -> int:
        return -(-tokens // self.ranks)

    def own_tokens(self, column: NDArray[Any]) -> NDArray[Any]:
        """Returns this rank's share of a pack's tokens or positions, padded with 0.  [T] -> [share]"""
        length = self.share_length(len(column))
        return np.pad(column, (0, length * self.ranks - len(column)))[self.rank * length :][:length]

    def own_targets(self, logit_positions: NDArray[Any], tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the targets that this rank's tokens predict, and the places of these tokens in its share.  [K] -> [k] twice"""
        length = self.share_length(tokens)
        places = logit_positions - self.rank * length
        own = np.flatnonzero((places >= 0) & (places < length))
        return own, places[own]

    def gather(self, own: Tensor, targets: Tensor, count: int) -> Tensor:
        """Joins what each rank computed for its own targets.  [k, …], [k] -> [K, …]"""
        if self.ranks == 1:
            return own
        whole: Tensor = GatherTargets.apply(own, targets, count, self)
        return whole

    def heads_of(self, x: Tensor, tokens: int) -> Tensor:
        """Exchanges tokens for heads: a part of the heads for the whole pack.  [1, H, share, D] -> [1, H / ranks, T, D]"""
        if x.shape[1] % self.ranks:
            x = x.repeat_interleave(self.ranks // x.shape[1], dim=1)  # each head of keys for several ranks
        parts = self.all_to_all(x[0].unflatten(0, (self.ranks, -1)).contiguous())
        return parts.transpose(0, 1).flatten(1, 2)[None, :, :tokens]

    def tokens_of(self, x: Tensor) -> Tensor:
        """Exchanges heads for tokens: all heads for this rank's share.  [1, T, H / ranks, D] -> [1, share, H, D]"""
        length = self.share_length(x.shape[1])
        padded = F.pad(x[0], (0, 0, 0, 0, 0, length * self.ranks - x.shape[1]))
        parts = self.all_to_all(padded.unflatten(0, (self.ranks, length)).contiguous())
        return parts.transpose(0, 1).flatten(1, 2)[None]


ALONE = SequenceGroup()


class GatherTargets(torch.autograd.Function):
    """Adds up over the ranks what each has for its targets.

    Every rank computes the loss of the whole pack. Its gradient is for its own targets only: gradients of ranks are added
    up later, with those of other packs.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, targets: Tensor, count: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(targets)
        whole = own.new_zeros(count, *own.shape[1:]).index_copy_(0, targets, own)
        if count:
            group.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (targets,) = ctx.saved_tensors
        return grad.index_select(0, targets), None, None, None
