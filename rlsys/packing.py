"""From a mini-batch to packs: who gets which sequences, and what each token weighs.

The loss weights are decided here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so the
update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlsys.types import Batch, Floats, Pack


def token_weights(lengths: Tensor, normalize: str, *, constant: int = 0) -> Tensor:
    """The factor of each token's loss in a mini-batch of N sequences.  [N] -> [sum(lengths)]

    token_mean     1 / all tokens: every token counts the same (arXiv 2503.14476)
    sequence_mean  1 / (N x own length): every sequence counts the same, GRPO as published; lenient on long wrong answers
    constant       1 / (N x constant): no length bias (Dr. GRPO, arXiv 2503.20783)
    """
    if lengths.dim() != 1 or (lengths < 0).any():
        raise ValueError(f"token_weights: lengths must be [N] and not negative; got {lengths.tolist()}.")
    repeats = lengths.long()
    count, total = max(len(lengths), 1), max(int(repeats.sum()), 1)
    if normalize == "token_mean":
        per_sequence = torch.full((len(lengths),), 1.0 / total)
    elif normalize == "sequence_mean":
        per_sequence = 1.0 / (count * repeats.clamp(min=1).float())
    elif normalize == "constant":
        if constant <= 0:
            raise ValueError(f"token_weights: normalize=constant needs constant > 0; it is {constant}.")
        per_sequence = torch.full((len(lengths),), 1.0 / (count * constant))
    else:
        raise ValueError(f"token_weights: normalize is {normalize!r}; known: token_mean, sequence_mean, constant.")
    return per_sequence.repeat_interleave(repeats)


def pack(
    batch: Batch,
    members: Sequence[int],
    *,
    ranks: int,
    tokens_per_pack: int,
    advantages: Tensor | None = None,
    normalize: str = "token_mean",
    constant: int = 0,
    old: list[Floats] | None = None,
    ref: list[Floats] | None = None,
) -> list[list[Pack]]:
    """The samples `members` of a batch as packs, `[rank][i]`: every rank gets the same number, of about the same size.

    Without `advantages` the packs are for scoring only.
    """
    columns = [
        np.concatenate([np.asarray(batch.prompts[batch.groups[m]].tokens), batch.samples[m].tokens]) for m in members
    ]
    lengths = torch.tensor([len(batch.samples[m].tokens) for m in members], dtype=torch.long)
    weights = np.split(token_weights(lengths, normalize, constant=constant).numpy(), np.cumsum(lengths.numpy())[:-1])
    bins = spread([len(c) - 1 for c in columns], ranks, tokens_per_pack)

    def one(chosen: list[int]) -> Pack:
        if not chosen:
            return filler(old is not None, ref is not None)
        inputs, completions = [len(columns[j]) - 1 for j in chosen], [int(lengths[j]) for j in chosen]
        starts = np.cumsum([0, *inputs[:-1]])
        ids = [members[j] for j in chosen]

        def join(arrays: list[Floats]) -> Floats:
            return np.concatenate(arrays).astype(np.float32)

        return Pack(
            tokens=np.concatenate([columns[j][:-1] for j in chosen]).astype(np.int64),
            lengths=inputs,
            predict=np.concatenate(
                [s + np.arange(n - c, n) for s, n, c in zip(starts, inputs, completions, strict=True)]
            ),
            targets=np.concatenate([batch.samples[m].tokens for m in ids]).astype(np.int64),
            sequences=np.repeat(np.arange(len(chosen)), completions),
            samples=ids,
            rollout=join([batch.samples[m].logprobs for m in ids]),
            advantages=np.repeat(
                advantages.numpy()[ids] if advantages is not None else np.zeros(len(ids)), completions
            ).astype(np.float32),
            weights=join([weights[j] for j in chosen]),
            old=None if old is None else join([old[m] for m in ids]),
            ref=None if ref is None else join([ref[m] for m in ids]),
        )

    return [[one(b) for b in bins[rank::ranks]] for rank in range(ranks)]


def unpack(packs: list[list[Pack]], values: list[list[Floats]], count: int) -> list[Floats]:
    """Per-token values of packs, back in batch order: one array per sample."""
    out: list[Floats] = [np.zeros(0, dtype=np.float32)] * count
    for rank_packs, rank_values in zip(packs, values, strict=True):
        for p, v in zip(rank_packs, rank_values, strict=True):
            ends = np.cumsum(np.bincount(p.sequences, minlength=len(p.samples)))
            for sample, own in zip(p.samples, np.split(v, ends[:-1]), strict=False):
                out[sample] = own
    return out


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


def filler(old: bool, ref: bool) -> Pack:
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
        advantages=no_floats,
        weights=no_floats,
        old=no_floats if old else None,
        ref=no_floats if ref else None,
    )
