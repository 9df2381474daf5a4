"""From a mini-batch to packs: what each token weighs, and how sequences are laid end to end.

The loss weights are decided here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so the
update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config.options import validate_options
from rlsys.config.schema import NORMALIZERS
from rlsys.packs.balance import DEFAULT_PAIRS_PER_TOKEN, SequenceSize, assign_to_ranks
from rlsys.types import Batch, Columns, Floats, Ints, Pack, split_column

EMPTY = np.zeros(0, dtype=np.float32)


def token_weights(lengths: Tensor, normalize: str, **options: float) -> Tensor:
    """The factor of each token's loss in a mini-batch of N sequences.  [N] -> [sum(lengths)]

    token_mean     1 / all tokens: every token counts the same (arXiv 2503.14476)
    sequence_mean  1 / (N x own length): every sequence counts the same, GRPO as published; lenient on long wrong answers
    sequence_sum   1 / N: the plain policy gradient; the sum over a sequence, the mean over sequences
    constant       1 / (N x constant): the same in other units, no length bias (Dr. GRPO, arXiv 2503.20783)
    decoupled      control_weight / N for the first token, 1 / (N x the rest's length) for the rest (DeGRPO, arXiv 2505.13379)

    Options: `constant`, in tokens; `control_weight`, 1e-3 as in the paper. The others do without.
    """
    options = validate_options("token_weights", options, ("constant", "control_weight"), ("constant", "control_weight"))
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
    pairs_per_token: float = DEFAULT_PAIRS_PER_TOKEN,
    columns: Columns | None = None,
    weights: Floats | None = None,
    share_prompts: bool = True,
) -> list[list[Pack]]:
    """The samples `members` of a batch as packs, `[rank][i]`: every rank gets the same number, of about the same cost.

    What they cost depends on the model: see `rlsys.models.shapes.pairs_per_token`. `weights` are those of the members' tokens, end to end. Without them the packs are for scoring only. A sample whose tokens
    all weigh nothing is left out. Samples of one prompt in one pack share it, unless `share` is false.
    """
    columns, samples = columns or Columns(), batch.samples
    lengths = [len(samples[m].tokens) for m in members]
    if weights is not None and len(weights) != sum(lengths):
        raise ValueError(f"pack: weights has {len(weights)} numbers; the members have {sum(lengths)} tokens.")
    weighs = None if weights is None else dict(zip(members, split_column(weights, lengths), strict=True))

    def family(m: int) -> int:
        return int(batch.groups[m]) if share_prompts else m

    def sized(m: int) -> SequenceSize:
        return SequenceSize(m, family(m), len(batch.prompts[batch.groups[m]].tokens), len(samples[m].tokens) - 1)

    def laid(ids: list[int]) -> PackBuilder:
        found = PackBuilder()
        for _, some in groupby(ids, family):
            own = list(some)
            found.add_prompt_group(batch.prompts[batch.groups[own[0]]].tokens, [samples[m].tokens for m in own])
        return found

    kept = [sized(m) for m, n in zip(members, lengths, strict=True) if (n if weighs is None else weighs[m].any())]
    dealt = assign_to_ranks(kept, ranks, tokens_per_pack, pairs_per_token)
    chosen = [sorted(ids, key=lambda m: (family(m), m)) for packs in dealt for ids in packs if ids]

    def of_targets(own: Callable[[int], NDArray[Any]]) -> list[NDArray[Any]]:
        return concat_and_split([[own(m) for m in ids] for ids in chosen])

    pieces = [laid(ids) for ids in chosen]
    tokens, targets = concat_and_split([p.tokens for p in pieces]), of_targets(lambda m: samples[m].tokens)
    rollout = of_targets(lambda m: samples[m].logprobs)
    weighed = [EMPTY] * len(chosen) if weighs is None else of_targets(weighs.__getitem__)
    split = {name: batch.split(column) for name, column in vars(columns).items() if column is not None}
    found = {name: of_targets(own.__getitem__) for name, own in split.items()}
    made = (
        Pack(
            tokens=tokens[i],
            lengths=pieces[i].lengths,
            parent=pieces[i].after,
            targets=targets[i],
            samples=ids,
            target_counts=[len(samples[m].tokens) for m in ids],
            first_logit=pieces[i].first,
            next_logits=pieces[i].rest,
            rollout=rollout[i],
            weights=weighed[i],
            columns=Columns(**{name: column[i] for name, column in found.items()}),
        )
        for i, ids in enumerate(chosen)
    )
    return [[next(made) if ids else empty_pack(columns) for ids in packs] for packs in dealt]


def concat_and_split(parts: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """The parts of each pack in one array. They all lie in one that is cut: to get new memory for each costs more than to fill it."""
    if not parts:
        return []
    return split_column(np.concatenate([part for own in parts for part in own]), [sum(map(len, own)) for own in parts])


class PackBuilder:
    """The pieces of a pack, as far as they are laid down: see `Pack`."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = []
        self.lengths: list[int] = []
        self.after: list[int] = []
        self.first: list[int] = []
        self.rest: list[int] = []
        self.end = 0

    def add_prompt_group(self, prompt: list[int], completions: list[Ints]) -> None:
        """Samples of one prompt: one of them alone in one piece, several as pieces that continue their prompt's."""
        parent, alone = len(self.lengths), len(completions) == 1
        self.append_tokens(np.array(prompt, dtype=np.int32), after=-1)
        last = self.end - 1
        for tokens in completions:
            self.first.append(last)
            self.rest.append(self.end)
            if len(tokens) > 1:
                self.append_tokens(tokens[:-1], after=None if alone else parent)

    def append_tokens(self, tokens: Ints, after: int | None) -> None:
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
            for sample, own in zip(p.samples, split_column(v, p.target_counts), strict=True):
                out[sample] = own
    return np.concatenate(out)


def empty_pack(columns: Columns) -> Pack:
    """A pack that adds nothing, for a rank with no sequence left: ZeRO's collectives need all ranks to take part."""
    return Pack(
        tokens=np.zeros(1, dtype=np.int32),
        lengths=[1],
        parent=[-1],
        targets=np.zeros(0, dtype=np.int32),
        samples=[],
        target_counts=[],
        first_logit=[],
        next_logits=[],
        rollout=EMPTY,
        weights=EMPTY,
        columns=Columns(**{name: EMPTY for name, column in vars(columns).items() if column is not None}),
    )
