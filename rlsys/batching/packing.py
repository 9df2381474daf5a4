"""From a mini-batch to packs: weights the tokens, and lays sequences end to end.

The loss weights are computed here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so
the update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.batching.balance import DEFAULT_PAIRS_PER_TOKEN, SequenceSize, assign_to_ranks
from rlsys.config.methods import NORMALIZERS
from rlsys.config.options import validate_options
from rlsys.types import NO_TOKENS, Batch, Columns, Floats, Ints, Pack, Prompt, Sample, split_column

PackBatch = Callable[..., list[list[Pack]]]  # `pack` with its budget filled in
EMPTY = np.zeros(0, dtype=np.float32)

# --- loss weights -----------------------------------------------------------------------------------------------------


def token_weights(lengths: Tensor, normalize: str, starts: Tensor | None = None, **options: float) -> Tensor:
    """The weight of each token's loss in a mini-batch of N sequences.  [N] -> [sum(lengths)]

    token_mean     1 / all tokens: every token counts the same (arXiv 2503.14476)
    sequence_mean  1 / (N x its length): every sequence counts the same, as in GRPO; lenient on long wrong answers
    sequence_sum   1 / N: the plain policy gradient; the sum over a sequence, the mean over sequences
    constant       1 / (N x constant): the same in other units, no length bias (Dr. GRPO, arXiv 2503.20783)
    decoupled      control_weight / N for the control token, 1 / (N x the rest's length) for the rest (arXiv 2505.13379)

    `starts` [N] marks the sequences whose first token is a control token; without it, all have one.

    Options: `constant`, in tokens; `control_weight`, 1e-3 as in the paper. The other methods have no options.
    """
    options = validate_options("token_weights", options, ("constant", "control_weight"), ("constant", "control_weight"))
    if lengths.dim() != 1 or lengths.is_floating_point() or (lengths < 0).any():
        raise ValueError(f"token_weights: lengths must be whole numbers [N], not negative; got {lengths.tolist()}.")
    count, lengths = max(len(lengths), 1), lengths.long()
    starts = (lengths > 0) & (True if starts is None else starts)
    per_sequence = weight_per_sequence(lengths, starts, normalize, count, options.get("constant", 0))
    weights = torch.from_numpy(np.repeat(per_sequence.numpy(), lengths.numpy()))  # much faster than in torch
    if normalize == "decoupled":
        firsts = (lengths.cumsum(0) - lengths)[starts]
        weights[firsts] = options.get("control_weight", 1e-3) / count
    return weights


def weight_per_sequence(lengths: Tensor, starts: Tensor, normalize: str, count: int, constant: float) -> Tensor:
    """The weight of each token of a sequence; with `decoupled`, of each but a control token.  [N], [N] -> [N]"""
    if normalize == "token_mean":
        return torch.full((len(lengths),), 1.0 / max(int(lengths.sum()), 1))
    if normalize == "sequence_mean":
        return 1.0 / (count * lengths.clamp(min=1).float())
    if normalize == "sequence_sum":
        return torch.full((len(lengths),), 1.0 / count)
    if normalize == "constant":
        if not constant:
            raise ValueError(f"token_weights: normalize=constant needs constant > 0; it is {constant}.")
        return torch.full((len(lengths),), 1.0 / (count * constant))
    if normalize == "decoupled":
        return 1.0 / (count * (lengths - starts.long()).clamp(min=1).float())
    raise ValueError(f"token_weights: normalize is {normalize!r}; known: {', '.join(NORMALIZERS)}.")


# --- packs ------------------------------------------------------------------------------------------------------------


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
    """Packs the samples `members` of a batch, `[rank][i]`: equally many packs per rank, of about the same cost.

    `weights` are those of the members' tokens, end to end. Without them the packs serve scoring only. A sample whose
    tokens all weigh 0 is left out. Samples of one prompt share it within a pack, unless `share_prompts` is false.
    The cost depends on the model: see `rlsys.models.lookup.pairs_per_token`.
    """
    batch = join_openings(batch)
    prompt_groups = batch.groups.tolist() if share_prompts else range(len(batch.samples))
    sample_weights = None if weights is None else split_weights(batch, members, weights)
    sizes = [sequence_size(batch, m, prompt_groups) for m in select(batch, members, sample_weights)]
    assigned = assign_to_ranks(sizes, ranks, tokens_per_pack, pairs_per_token)
    return build(batch, assigned, prompt_groups, columns or Columns(), sample_weights)


def join_openings(batch: Batch) -> Batch:
    """The batch with what an environment said before a sample's first token as its prompt.

    Samples of a group that begin alike share it, as they share a prompt.
    """
    if not any(s.observations and not s.observations[0].at for s in batch.samples):
        return batch
    prompts: dict[tuple[int, bytes], Prompt] = {}
    groups, samples = [], []
    for group, sample in zip(batch.groups.tolist(), batch.samples, strict=True):
        opens = sample.observations and not sample.observations[0].at
        opening = sample.observations[0].tokens if opens else NO_TOKENS
        key, prompt = (group, opening.tobytes()), batch.prompts[group]
        if key not in prompts:
            prompts[key] = replace(prompt, tokens=[*prompt.tokens, *opening.tolist()])
        groups.append(key)
        samples.append(replace(sample, observations=sample.observations[1:]) if opens else sample)
    number = {key: i for i, key in enumerate(prompts)}
    numbers = np.array([number[key] for key in groups], dtype=np.int64)
    return replace(batch, prompts=list(prompts.values()), groups=numbers, samples=samples)


def split_weights(batch: Batch, members: Sequence[int], weights: Floats) -> dict[int, Floats]:
    """The weights of each member's tokens, by sample."""
    lengths = [len(batch.samples[m].tokens) for m in members]
    if len(weights) != sum(lengths):
        raise ValueError(f"pack: weights has {len(weights)} numbers; the members have {sum(lengths)} tokens.")
    return dict(zip(members, split_column(weights, lengths), strict=True))


def select(batch: Batch, members: Sequence[int], weights: Mapping[int, Floats] | None) -> list[int]:
    """Selects the members that need computing: those with tokens, or where weights are given, with a weight above 0."""
    return [m for m in members if (len(batch.samples[m].tokens) if weights is None else weights[m].any())]


def sequence_size(batch: Batch, sample: int, prompt_groups: Sequence[int]) -> SequenceSize:
    prompt = batch.prompts[batch.groups[sample]]
    return SequenceSize(sample, prompt_groups[sample], len(prompt.tokens), batch.samples[sample].input_count)


def build(
    batch: Batch,
    assigned: list[list[list[int]]],
    prompt_groups: Sequence[int],
    columns: Columns,
    weights: Mapping[int, Floats] | None,
) -> list[list[Pack]]:
    """Builds the packs of the assigned samples, `[rank][i]`. A pack without samples becomes an `empty_pack`."""
    filled = [sorted(samples, key=lambda m: (prompt_groups[m], m)) for rank in assigned for samples in rank if samples]
    builders = [lay_out(batch, samples, prompt_groups) for samples in filled]
    tokens = concat_and_split([builder.tokens for builder in builders])
    targets = gather(filled, [s.tokens for s in batch.samples])
    rollout = gather(filled, [s.logprobs for s in batch.samples])
    token_weights = [EMPTY] * len(filled) if weights is None else gather(filled, weights)
    by_name = {
        name: gather(filled, batch.split(column)) for name, column in vars(columns).items() if column is not None
    }
    packs = iter(
        [
            Pack(
                tokens=tokens[i],
                lengths=builders[i].lengths,
                parent=builders[i].parents,
                targets=targets[i],
                samples=samples,
                target_counts=[len(batch.samples[m].tokens) for m in samples],
                turn_counts=builders[i].turn_counts,
                first_logit=builders[i].first_logits,
                next_logits=builders[i].next_logits,
                rollout=rollout[i],
                weights=token_weights[i],
                columns=Columns(**{name: column[i] for name, column in by_name.items()}),
            )
            for i, samples in enumerate(filled)
        ]
    )
    return [[next(packs) if samples else empty_pack(columns) for samples in rank] for rank in assigned]


def lay_out(batch: Batch, samples: list[int], prompt_groups: Sequence[int]) -> "PackBuilder":
    """Lays the samples of a pack end to end, prompt group by prompt group."""
    builder = PackBuilder()
    for _, group in groupby(samples, prompt_groups.__getitem__):
        members = list(group)
        prompt = batch.prompts[batch.groups[members[0]]].tokens
        builder.add_prompt_group(prompt, [batch.samples[m] for m in members])
    return builder


def gather(
    packs: list[list[int]], by_sample: Mapping[int, NDArray[Any]] | Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Concatenates the arrays of each pack's samples."""
    return concat_and_split([[by_sample[m] for m in samples] for samples in packs])


def concat_and_split(parts: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Concatenates the parts of each pack. Packs share one allocation: one for each would cost more than the copy."""
    if not parts:
        return []
    return split_column(
        np.concatenate([part for pack_parts in parts for part in pack_parts]),
        [sum(map(len, pack_parts)) for pack_parts in parts],
    )


class PackBuilder:
    """The pieces of a pack while they are laid end to end: see `Pack`."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = []
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.turn_counts: list[int] = []
        self.first_logits: list[int] = []
        self.next_logits: list[int] = []
        self.end = 0

    def add_prompt_group(self, prompt: list[int], samples: list[Sample]) -> None:
        """Adds samples of one prompt: a single one in one piece with it, several as pieces that continue it."""
        parent, single = len(self.lengths), len(samples) == 1
        self.append_piece(np.array(prompt, dtype=np.int32), parent=-1)
        last = self.end - 1
        for sample in samples:
            self.add_turns(sample, last)
            inputs = sample.inputs
            if len(inputs) and single:
                self.extend_piece(inputs)
            elif len(inputs):
                self.append_piece(inputs, parent)

    def add_turns(self, sample: Sample, last_of_prompt: int) -> None:
        """Notes where the outputs lie that predict the tokens of a sample, which is added next."""
        end = self.end
        for before, own in sample.turns:
            start = end + len(before)
            self.turn_counts.append(len(own))
            self.first_logits.append(start - 1 if start > self.end else last_of_prompt)
            self.next_logits.append(start)
            end = start + len(own)

    def append_piece(self, tokens: Ints, parent: int) -> None:
        self.lengths.append(0)
        self.parents.append(parent)
        self.extend_piece(tokens)

    def extend_piece(self, tokens: Ints) -> None:
        self.tokens.append(tokens)
        self.lengths[-1] += len(tokens)
        self.end += len(tokens)


def unpack(packs: list[list[Pack]], values: list[list[Floats]], count: int) -> Floats:
    """Brings per-token values of packs back into batch order, end to end.  [T]"""
    by_sample: list[Floats] = [np.zeros(0, dtype=np.float32)] * count
    for rank_packs, rank_values in zip(packs, values, strict=True):
        for p, column in zip(rank_packs, rank_values, strict=True):
            for sample, part in zip(p.samples, split_column(column, p.target_counts), strict=True):
                by_sample[sample] = part
    return np.concatenate(by_sample)


def empty_pack(columns: Columns) -> Pack:
    """A pack that adds nothing, for a rank with no sequences left: ZeRO's collectives need all ranks to take part."""
    return Pack(
        tokens=np.zeros(1, dtype=np.int32),
        lengths=[1],
        parent=[-1],
        targets=np.zeros(0, dtype=np.int32),
        samples=[],
        target_counts=[],
        turn_counts=[],
        first_logit=[],
        next_logits=[],
        rollout=EMPTY,
        weights=EMPTY,
        columns=Columns(**{name: EMPTY for name, column in vars(columns).items() if column is not None}),
    )
