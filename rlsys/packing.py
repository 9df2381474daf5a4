"""From a mini-batch to packs: what each token weighs, and how sequences are laid end to end.

The loss weights are decided here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so the
update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config import NORMALIZERS
from rlsys.dealing import PAIRS_PER_TOKEN, Sized, deal
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
    weights = torch.from_numpy(np.repeat(each.numpy(), lengths.numpy()))  # several times as fast as torch's own
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
    pairs_per_token: float = PAIRS_PER_TOKEN,
    columns: Columns | None = None,
    weights: Floats | None = None,
    share: bool = True,
) -> list[list[Pack]]:
    """The samples `members` of a batch as packs, `[rank][i]`: every rank gets the same number, of about the same cost.

    What they cost depends on the model: see `rlsys.shapes.pairs_per_token`. `weights` are those of the members' tokens, end to end. Without them the packs are for scoring only. A sample whose tokens
    all weigh nothing is left out. Samples of one prompt in one pack share it, unless `share` is false.
    """
    columns = columns or Columns()
    lengths = [len(batch.samples[m].tokens) for m in members]
    flat = np.zeros(sum(lengths), dtype=np.float32) if weights is None else weights
    if len(flat) != sum(lengths):
        raise ValueError(f"pack: weights has {len(flat)} numbers; the members have {sum(lengths)} tokens.")
    own = dict(zip(members, np.split(flat, np.cumsum(lengths, dtype=np.int64))[:-1], strict=True))
    split = {name: batch.split(column) for name, column in vars(columns).items() if column is not None}

    def family(m: int) -> int:
        return int(batch.groups[m]) if share else m

    def sized(m: int) -> Sized:
        return Sized(m, family(m), len(batch.prompts[batch.groups[m]].tokens), len(batch.samples[m].tokens) - 1)

    def one(chosen: list[int]) -> Pack:
        if not chosen:
            return filler(columns)
        ids = sorted(chosen, key=lambda m: (family(m), m))
        laid = Laid()
        for _, together in groupby(ids, family):
            laid.add(batch, list(together))
        return Pack(
            tokens=np.concatenate(laid.tokens, dtype=np.int64),
            lengths=laid.lengths,
            after=laid.after,
            predict=np.concatenate(laid.predict),
            targets=np.concatenate([batch.samples[m].tokens for m in ids], dtype=np.int64),
            sequences=np.repeat(np.arange(len(ids)), [len(batch.samples[m].tokens) for m in ids]),
            samples=ids,
            rollout=np.concatenate([batch.samples[m].logprobs for m in ids]),
            weights=np.concatenate([own[m] for m in ids]),
            columns=Columns(**{name: np.concatenate([parts[m] for m in ids]) for name, parts in split.items()}),
        )

    kept = [sized(m) for m in members if (len(own[m]) if weights is None else own[m].any())]
    return [[one(chosen) for chosen in packs] for packs in deal(kept, ranks, tokens_per_pack, pairs_per_token)]


class Laid:
    """The pieces of a pack, as far as they are laid down: see `Pack`."""

    def __init__(self) -> None:
        self.tokens: list[NDArray[np.integer]] = []
        self.lengths: list[int] = []
        self.after: list[int] = []
        self.predict: list[NDArray[np.int64]] = []
        self.end = 0

    def add(self, batch: Batch, together: list[int]) -> None:
        """Samples of one prompt: one of them alone in one piece, several as pieces that continue their prompt's."""
        prompt = np.asarray(batch.prompts[batch.groups[together[0]]].tokens)
        parent, alone = len(self.lengths), len(together) == 1
        self.lay(prompt, after=-1)
        last = self.end - 1
        for m in together:
            tokens = batch.samples[m].tokens
            if len(tokens):
                self.predict += [np.array([last]), np.arange(self.end, self.end + len(tokens) - 1)]
            if len(tokens) > 1:
                self.lay(tokens[:-1], after=None if alone else parent)

    def lay(self, tokens: NDArray[np.integer], after: int | None) -> None:
        """`after` None: more of the piece that was laid last."""
        self.tokens.append(tokens)
        self.end += len(tokens)
        if after is None:
            self.lengths[-1] += len(tokens)
        else:
            self.lengths.append(len(tokens))
            self.after.append(after)


def unpack(packs: list[list[Pack]], values: list[list[Floats]], count: int) -> Floats:
    """Per-token values of packs, back in batch order, end to end.  [T]"""
    out: list[Floats] = [np.zeros(0, dtype=np.float32)] * count
    for rank_packs, rank_values in zip(packs, values, strict=True):
        for p, v in zip(rank_packs, rank_values, strict=True):
            ends = np.cumsum(np.bincount(p.sequences, minlength=len(p.samples)))
            for sample, own in zip(p.samples, np.split(v, ends[:-1]), strict=False):
                out[sample] = own
    return np.concatenate(out)


def filler(columns: Columns) -> Pack:
    """A pack that adds nothing, for a rank with no sequence left: ZeRO's collectives need all ranks to take part."""
    no_floats, no_ints = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    return Pack(
        tokens=np.zeros(1, dtype=np.int64),
        lengths=[1],
        after=[-1],
        predict=no_ints,
        targets=no_ints,
        sequences=no_ints,
        samples=[],
        rollout=no_floats,
        weights=no_floats,
        columns=Columns(**{name: no_floats for name, column in vars(columns).items() if column is not None}),
    )
