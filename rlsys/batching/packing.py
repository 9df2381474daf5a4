"""From a mini-batch to packs: weights the tokens, and lays sequences end to end.

The loss weights are computed here, once, over the whole mini-batch. A rank's loss is `(token_loss * weights).sum()`, so
the update does not depend on the token budget, the number of ranks or the ZeRO stage.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.batching.balance import DEFAULT_PAIRS_PER_TOKEN, SequenceSize, assign_to_ranks
from rlsys.batching.pack_builder import PackBuilder
from rlsys.batching.turn_tree import TurnTree
from rlsys.config.methods import NORMALIZERS
from rlsys.config.options import validate_options
from rlsys.types import Batch, Columns, Floats, Pack, split_column

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
    tokens all weigh 0 is left out. Samples of one prompt share it within a pack, and the turns that they begin with,
    unless `share_prompts` is false.
    The cost depends on the model: see `rlsys.models.lookup.pairs_per_token`.
    """
    prompt_groups = batch.groups.tolist() if share_prompts else range(len(batch.samples))
    sample_weights = None if weights is None else split_weights(batch, members, weights)
    members = select(batch, members, sample_weights)
    tree = grow_tree(batch, members, prompt_groups)
    sizes = [sequence_size(batch, m, prompt_groups, tree) for m in members]
    assigned = assign_to_ranks(sizes, ranks, tokens_per_pack, pairs_per_token)
    return build(batch, assigned, prompt_groups, tree, columns or Columns(), sample_weights)


def split_weights(batch: Batch, members: Sequence[int], weights: Floats) -> dict[int, Floats]:
    """The weights of each member's tokens, by sample."""
    lengths = [len(batch.samples[m].tokens) for m in members]
    if len(weights) != sum(lengths):
        raise ValueError(f"pack: weights has {len(weights)} numbers; the members have {sum(lengths)} tokens.")
    return dict(zip(members, split_column(weights, lengths), strict=True))


def select(batch: Batch, members: Sequence[int], weights: Mapping[int, Floats] | None) -> list[int]:
    """Selects the members that need computing: those with tokens, or where weights are given, with a weight above 0."""
    return [m for m in members if (len(batch.samples[m].tokens) if weights is None else weights[m].any())]


def grow_tree(batch: Batch, members: Sequence[int], prompt_groups: Sequence[int]) -> TurnTree:
    tree = TurnTree()
    for member in members:
        prompt = batch.prompts[batch.groups[member]]
        tree.add(member, batch.samples[member], prompt_groups[member], len(prompt.tokens))
    return tree


def sequence_size(batch: Batch, member: int, prompt_groups: Sequence[int], tree: TurnTree) -> SequenceSize:
    prompt, stems = batch.prompts[batch.groups[member]], tree.stems(member)
    own = sum(tree.nodes[node].tokens for node in tree.paths[member][len(stems) :])
    return SequenceSize(member, prompt_groups[member], len(prompt.tokens), own, stems)


def build(
    batch: Batch,
    assigned: list[list[list[int]]],
    prompt_groups: Sequence[int],
    tree: TurnTree,
    columns: Columns,
    weights: Mapping[int, Floats] | None,
) -> list[list[Pack]]:
    """Builds the packs of the assigned samples, `[rank][i]`. A pack without samples becomes an `empty_pack`."""
    filled = [sorted(samples, key=lambda m: (prompt_groups[m], m)) for rank in assigned for samples in rank if samples]
    builders = [lay_out(batch, samples, prompt_groups, tree) for samples in filled]
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
                turn_counts=[turn.targets for turn in builders[i].turns],
                first_logit=[turn.first_logit for turn in builders[i].turns],
                next_logits=[turn.next_logits for turn in builders[i].turns],
                rollout=rollout[i],
                weights=token_weights[i],
                columns=Columns(**{name: column[i] for name, column in by_name.items()}),
            )
            for i, samples in enumerate(filled)
        ]
    )
    return [[next(packs) if samples else empty_pack(columns) for samples in rank] for rank in assigned]


def lay_out(batch: Batch, members: list[int], prompt_groups: Sequence[int], tree: TurnTree) -> PackBuilder:
    """Lays the samples of a pack end to end, prompt group by prompt group."""
    builder = PackBuilder(tree)
    for group, samples in groupby(members, prompt_groups.__getitem__):
        same_prompt = list(samples)
        builder.add_prompt_group(-1 - group, batch.prompts[batch.groups[same_prompt[0]]].tokens, same_prompt)
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
