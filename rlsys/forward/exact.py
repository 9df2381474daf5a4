"""Batch-invariant arithmetic on CPU: the result for a row does not depend on the other rows of its batch.

Matrix libraries choose the order of summation by the number of rows: the result for one token may differ in the last
bit when it is computed alone, among 16 or among 4096. Here few rows are padded with zeros and many rows are split, so
that the library only sees between MIN_ROWS and MAX_ROWS rows, for which it sums in the same order. `depends_on_batch`
checks whether that holds on this machine.

The engine's linear layers always compute like this (compiled layers use `workers/cpu/linear.cpp`, with its own
method), so that a sample can be drawn again bit for bit among other samples. With `rollout.exact` the trainer's layers
do too, and both use `attend`: rollout and old log-probs are then the same number.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS, MAX_ROWS = 16, 256
KEY_BLOCK = 32  # the keys of a query are summed in blocks of this size, one block after the other


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear`.  [..., K], [N, K], [N] -> [..., N]"""
    if MIN_ROWS <= x.numel() // x.shape[-1] <= MAX_ROWS:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # [R, K]
    if len(rows) < MIN_ROWS:
        out = F.linear(F.pad(rows, (0, 0, 0, MIN_ROWS - len(rows))), weight, bias)[: len(rows)]
    else:
        out = torch.cat([linear(part, weight, bias) for part in rows.split(MAX_ROWS)])
    return out.view(*x.shape[:-1], len(weight))


class ExactLinear(nn.Linear):
    """A linear layer that computes with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_exact_linear(model: nn.Module) -> None:
    """Turns the model's linear layers into `ExactLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ExactLinear


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attends with each query to the first `seen` keys.  [B, M, D], [B, L, D], [B, L, D], [B, M] -> [B, M, D]

    L is a multiple of KEY_BLOCK. Keys beyond `seen` add exactly nothing, however many there are.
    """
    rows, length = query.shape[1], key.shape[1]
    if rows < MIN_ROWS:
        query = F.pad(query, (0, 0, 0, MIN_ROWS - rows))
    starts = range(0, length, KEY_BLOCK)
    scores = [query @ key[:, start : start + KEY_BLOCK].transpose(1, 2) for start in starts]
    logits = torch.cat(scores, dim=-1)[:, :rows] * scale
    unseen = torch.arange(length, device=query.device) >= seen[..., None]  # [B, M, L]
    logits.masked_fill_(unseen, float("-inf"))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()  # a maximum is the same in any order
    if rows < MIN_ROWS:
        weights = F.pad(weights, (0, 0, 0, MIN_ROWS - rows))
    total, out = weights.new_zeros(*query.shape[:2], 1), torch.zeros_like(query)
    for start in starts:
        block = weights[..., start : start + KEY_BLOCK]
        total += block.sum(-1, keepdim=True)
        out += block @ value[:, start : start + KEY_BLOCK]
    return (out / total)[:, :rows]


def depends_on_batch(weight: Tensor, bias: Tensor | None = None, product: Callable[..., Tensor] = linear) -> bool:
    """Returns True if, on this machine, a row's result still depends on the other rows. Tried on random rows."""
    weight, bias = weight[:4096], None if bias is None else bias[:4096]
    rows = torch.randn(MAX_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    together = product(rows, weight, bias)
    parts = [(7, 8), (3, 3 + MIN_ROWS - 1), (5, 5 + MIN_ROWS), (1, 2 * MIN_ROWS + 4), (0, MAX_ROWS // 2 + 1)]
    return any(not torch.equal(product(rows[a:b], weight, bias), together[a:b]) for a, b in parts)
