"""Arithmetic whose result for a row does not depend on the rows it shares a batch with, on CPU.

Matrix libraries choose their order of summation by the number of rows: a token alone, among 16 and among 4096 may differ in
the last bit. Here few rows are filled up with zeros and many are taken in parts, so that the library only sees numbers of
rows between FEWEST and MOST, for which it sums alike; `rows_matter` looks whether that is so on this machine.

The engine's linear layers compute so (where they are compiled, `workers/cpu/linear.cpp` does it its own way): a sample can be drawn
again, bit for bit, among other samples. With `rollout.exact` the trainer's do too, and both use `attend`: rollout and old
log-probs become the same number.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS, MAX_ROWS = 16, 256
KEY_BLOCK = 32  # the keys of a query are summed in blocks of so many, one block after the other


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`.  [..., K], [N, K], [N] -> [..., N]"""
    if MIN_ROWS <= x.numel() // x.shape[-1] <= MAX_ROWS:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # [R, K]
    if len(rows) < MIN_ROWS:
        out = F.linear(F.pad(rows, (0, 0, 0, MIN_ROWS - len(rows))), weight, bias)[: len(rows)]
    else:
        out = torch.cat([linear(part, weight, bias) for part in rows.split(MAX_ROWS)])
    return out.view(*x.shape[:-1], len(weight))


class ExactLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_exact_linear(model: nn.Module) -> None:
    """From now on the model's linear layers compute so."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ExactLinear


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention of each query over the first `seen` keys.  [B, M, D], [B, L, D], [B, L, D], [B, M] -> [B, M, D]

    L is a multiple of KEYS. Keys that are not seen add exactly nothing, however many there are.
    """
    rows, length = query.shape[1], key.shape[1]
    if rows < MIN_ROWS:
        query = F.pad(query, (0, 0, 0, MIN_ROWS - rows))
    blocks = range(0, length, KEY_BLOCK)
    scores = torch.cat([query @ key[:, at : at + KEY_BLOCK].transpose(1, 2) for at in blocks], dim=-1)[:, :rows] * scale
    hidden = torch.arange(length, device=query.device) >= seen[..., None]  # [B, M, L]
    scores.masked_fill_(hidden, float("-inf"))
    chances = (scores - scores.amax(-1, keepdim=True)).exp()  # a maximum is the same in any order
    if rows < MIN_ROWS:
        chances = F.pad(chances, (0, 0, 0, MIN_ROWS - rows))
    total, out = chances.new_zeros(*query.shape[:2], 1), torch.zeros_like(query)
    for at in blocks:
        block = chances[..., at : at + KEY_BLOCK]
        total += block.sum(-1, keepdim=True)
        out += block @ value[:, at : at + KEY_BLOCK]
    return (out / total)[:, :rows]


def depends_on_batch(weight: Tensor, bias: Tensor | None = None, product: Callable[..., Tensor] = linear) -> bool:
    """Whether on this machine a row nonetheless gets another result among other rows. Tried on random ones."""
    weight, bias = weight[:4096], None if bias is None else bias[:4096]
    rows = torch.randn(MAX_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    whole = product(rows, weight, bias)
    parts = [(7, 8), (3, 3 + MIN_ROWS - 1), (5, 5 + MIN_ROWS), (1, 2 * MIN_ROWS + 4), (0, MAX_ROWS // 2 + 1)]
    return any(not torch.equal(product(rows[a:b], weight, bias), whole[a:b]) for a, b in parts)
