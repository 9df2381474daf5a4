"""From a mini-batch to packs: who gets which sequences, and what each token weighs.

The loss weights are decided here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so the
update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlsys.config import NORMALIZERS
from rlsys.options import accepted
from rlsys.types import Batch, Columns, Floats, Pack


def token_weights(lengths: Tensor, normalize: str, **options: float) -> Tensor:
    """The factor of each token's loss in a mini-batch of N sequences.  [N] -> [sum(lengths)]

    token_mean     1 / all tokens: every token counts the same (arXiv 2503.14476)
    sequence_mean  1 / (N x own length): every sequence counts the same, GRPO as published; lenient on long wrong answers
    sequence_sum   1 / N: the plain policy gradient; the sum over a sequence, the mean over sequences
    constant       1 / (N x constant): the same in other units, no length bias (Dr. GRPO, arXiv 2503.20783)
    decoupled      control_weight / N for the first token, 1 / (N x the rest's length) for the rest (DeGRPO, arXiv 2505.13379)

    Options: `constant`, in tokens; `control_weight`, 1e-3 as in the paper. The others do without.
    """
    options = accepted("token_weights", options, ("constant", "control_weight"), ("constant", "control_weight"))
    constant, control_weight = options.get("constant", 0), options.get("control_weight", 1e-3)
    if lengths.dim() != 1 or lengths.is_floating_point() or (lengths < 0).any():
        raise ValueError(f"token_weights: lengths must be whole numbers [N], not negative; got {lengths.tolist()}.")
    n, lengths = max(len(lengths), 1), lengths.long()
    if normalize == "token_mean":
        each = torch.full((len(lengths),), 1.0 / max(int(lengths.sum()), 1))
    elif normalize == "sequence_mean":
        each = 1.0 / (n * lengths.clamp(min=1).float())
    elif normalize == "sequence_sum":
        each = torch.full((len(lengths),), 1.0 / n)
    elif normalize == "constant":
        if not constant:
            raise ValueError(f"token_weights: normalize=constant needs constant > 0; it is {constant}.")
        each = torch.full((len(lengths),), 1.0 / (n * constant))
    elif normalize == "decoupled":
        each = 1.0 / (n * (lengths - 1).clamp(min=1).float())
    else:
        raise ValueError(f"token_weights: normalize is {normalize!r}; known: {', '.join(NORMALIZERS)}.")
    weights = each.repeat_interleave(lengths)
    if normalize == "decoupled":
        firsts = (lengths.cumsum(0) - lengths)[lengths > 0]
        weights[firsts] = control_weight / n
    return weights


def pack(
    batch: Batch,
    members: Sequence[int],
    *,
    ranks: int,
    tokens_per_pack: int,
    columns: Columns | None = None,
    weights: Floats | None = None,
) -> list[list[Pack]]:
    """The samples `members` of a batch as packs, `[rank][i]`: every rank gets the same number, of about the same size.

    `weights` are those of the members' tokens, end to end. Without them the packs are for scoring only. A sample whose tokens
    all weigh nothing is left out.
    """
    columns = columns or Columns()
    lengths = [len(batch.samples[m].tokens) for m in members]
    flat = np.zeros(sum(lengths), dtype=np.float32) if weights is None else weights
    if len(flat) != sum(lengths):
        raise ValueError(f"pack: weights has {len(flat)} numbers; the members have {sum(lengths)} tokens.")
    own = np.split(flat, np.cumsum(lengths, dtype=np.int64))[:-1]
    if weights is not None:
        members, own = [m for m, w in zip(members, own, strict=True) if w.any()], [w for w in own if w.any()]
    sequences = [
        np.concatenate([np.asarray(batch.prompts[batch.groups[m]].tokens), batch.samples[m].tokens]) for m in members
    ]
    split = {name: batch.split(column) for name, column in vars(columns).items() if column is not None}
    bins = spread([len(s) - 1 for s in sequences], ranks, tokens_per_pack)

    def one(chosen: list[int]) -> Pack:
        if not chosen:
            return filler(columns)
        ids = [members[j] for j in chosen]
        inputs, completions = [len(sequences[j]) - 1 for j in chosen], [len(batch.samples[m].tokens) for m in ids]
        starts = np.cumsum([0, *inputs[:-1]])
        return Pack(
            tokens=np.concatenate([sequences[j][:-1] for j in chosen]).astype(np.int64),
            lengths=inputs,
            predict=np.concatenate(
                [s + np.arange(n - c, n) for s, n, c in zip(starts, inputs, completions, strict=True)]
            ),
            targets=np.concatenate([batch.samples[m].tokens for m in ids]).astype(np.int64),
            sequences=np.repeat(np.arange(len(chosen)), completions),
            samples=ids,
            rollout=np.concatenate([batch.samples[m].logprobs for m in ids]),
            weights=np.concatenate([own[j] for j in chosen]),
            columns=Columns(**{name: np.concatenate([parts[m] for m in ids]) for name, parts in split.items()}),
        )

    return [[one(b) for b in bins[rank::ranks]] for rank in range(ranks)]


def unpack(packs: list[list[Pack]], values: list[list[Floats]], count: int) -> Floats:
    """Per-token values of packs, back in batch order, end to end.  [T]"""
    out: list[Floats] = [np.zeros(0, dtype=np.float32)] * count
    for rank_packs, rank_values in zip(packs, values, strict=True):
        for p, v in zip(rank_packs, rank_values, strict=True):
            ends = np.cumsum(np.bincount(p.sequences, minlength=len(p.samples)))
            for sample, own in zip(p.samples, np.split(v, ends[:-1]), strict=False):
                out[sample] = own
    return np.concatenate(out)


def spread(sizes: list[int], ranks: int, budget: int) -> list[list[int]]:
    """Sizes into bins under a budget, as few as fill all ranks equally often, largest first into the emptiest.

    spread([5, 3, 3, 1], ranks=2, budget=6) -> [[0, 3], [1, 2]]
    """
    count = -(-max(sum(sizes), 1) // (budget * ranks)) * ranks
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    while True:
        heap = [(0, b) for b in range(count)]
        bins: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            filled, b = heapq.heappop(heap)
            bins[b].append(i)
            heapq.heappush(heap, (filled + sizes[i], b))
        full = max(filled for filled, _ in heap)
        if full <= budget or all(len(b) <= 1 for b in bins):
            return [sorted(b) for b in bins]
        count += ranks


def filler(columns: Columns) -> Pack:
    """A pack that adds nothing, for a rank with no sequence left: ZeRO's collectives need all ranks to take part."""
    no_floats, no_ints = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    return Pack(
        tokens=np.zeros(1, dtype=np.int64),
        lengths=[1],
        predict=no_ints,
        targets=no_ints,
        sequences=no_ints,
        samples=[],
        rollout=no_floats,
        weights=no_floats,
        columns=Columns(**{name: no_floats for name, column in vars(columns).items() if column is not None}),
    )
