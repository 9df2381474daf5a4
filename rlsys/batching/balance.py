"""Assigns sequences to packs and packs to ranks, balanced by cost.

Sequences of one prompt share a pack where that saves work.
"""

import functools
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from rlsys.batching.turn_tree import Stems

# Pairs of query and key that cost as much as the linear layers of one token, for a model of unknown shape: the value of
# a model with 2 billion parameters.
DEFAULT_PAIRS_PER_TOKEN = 16384.0

GOOD_ENOUGH = 1.02  # slowest rank over the ideal cost per rank: no better balance is searched for


class SequenceSize(NamedTuple):
    """The input tokens of a sequence.

    SequenceSize(sample=17, prompt_group=2, prompt_tokens=256, completion_tokens=63, stems=(Stem(5, 40, 256),))
    """

    sample: int
    prompt_group: int  # sequences of one group have the same prompt, which a pack computes once
    prompt_tokens: int
    completion_tokens: int  # without those of its stems
    stems: Stems = ()  # that sequences of its group share

    @property
    def before(self) -> int:
        """The tokens that its own tokens continue."""
        return self.stems[-1].before + self.stems[-1].tokens if self.stems else self.prompt_tokens


CostedPack = tuple[float, list[SequenceSize]]


def count_tokens(sequences: Sequence[SequenceSize]) -> int:
    """Counts the tokens of a pack with these sequences."""
    prompts = {s.prompt_group: s.prompt_tokens for s in sequences}
    stems = {stem for s in sequences for stem in s.stems}
    return sum(prompts.values()) + sum(stem.tokens for stem in stems) + sum(s.completion_tokens for s in sequences)


def count_attention_pairs(sequences: Sequence[SequenceSize]) -> float:
    """Counts the pairs of query and key that attention computes for a pack with these sequences."""
    prompts = {s.prompt_group: s.prompt_tokens for s in sequences}
    stems = {stem for s in sequences for stem in s.stems}
    within_prompts = sum(tokens * tokens for tokens in prompts.values()) / 2
    within_stems = sum(stem.tokens * (stem.before + stem.tokens / 2) for stem in stems)
    return (
        within_prompts
        + within_stems
        + sum(s.completion_tokens * (s.before + s.completion_tokens / 2) for s in sequences)
    )


def pack_cost(sequences: Sequence[SequenceSize], pairs_per_token: float) -> float:
    """The cost of a pack with these sequences, in units of one token without attention.

    Prompt of 2048 tokens, completion of 1024, 8192 pairs per token:
    3072 + (2048² / 2 + 1024 · 2048 + 1024² / 2) / 8192 = 3648
    """
    return count_tokens(sequences) + count_attention_pairs(sequences) / pairs_per_token


def assign_to_ranks(
    sequences: Iterable[SequenceSize], ranks: int, budget: int, pairs_per_token: float = DEFAULT_PAIRS_PER_TOKEN
) -> list[list[list[int]]]:
    """Assigns samples to packs under a token budget, `[rank][i]`: equally many packs per rank, of about the same cost.

    Prompt groups are split into chunks that stay together. Small chunks balance the ranks best but repeat the prompts
    most. Several chunk sizes are tried; the one whose slowest rank finishes first wins.
    """
    cost = functools.partial(pack_cost, pairs_per_token=pairs_per_token)
    groups: dict[int, list[SequenceSize]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.prompt_group, []).append(sequence)
    ideal = sum(map(cost, groups.values())) / ranks
    best: list[list[list[int]]] = []
    least, chunk_count = float("inf"), 0
    for largest in chunk_sizes([len(group) for group in groups.values()], ranks):
        chunks = [chunk for group in groups.values() for chunk in split_group(group, largest, budget)]
        if chunks and len(chunks) == chunk_count:
            continue  # the budget allows no other choice
        chunk_count = len(chunks)
        bins = fill_bins([count_tokens(c) for c in chunks], [cost(c) for c in chunks], ranks, budget)
        packs = [[sequence for i in members for sequence in chunks[i]] for members in bins]
        assigned = deal_out([(cost(pack), pack) for pack in packs], ranks)
        slowest = max(sum(price for price, _ in rank_packs) for rank_packs in assigned)
        if slowest < least:
            best = [[[s.sample for s in pack] for _, pack in rank_packs] for rank_packs in assigned]
            least = slowest
        if least <= GOOD_ENOUGH * ideal:
            break
    return best


def chunk_sizes(group_sizes: list[int], ranks: int) -> Iterator[int]:
    """Yields the chunk sizes to try: the largest group's size, half of it, a quarter, … 1.

    With no more sequences than ranks, only 1: nothing is faster than a rank for each.
    """
    size = 1 if sum(group_sizes) <= ranks else max(group_sizes)
    while size:
        yield size
        size //= 2


def split_group(group: list[SequenceSize], largest: int, budget: int) -> list[list[SequenceSize]]:
    """Splits a prompt group into chunks of at most `largest` sequences and `budget` tokens, of about equal cost.

    A sequence that alone exceeds the budget is a chunk of its own. Sequences that share turns stay together.
    """
    if len({s.stems for s in group}) > 1:
        return split_forked_group(group, largest, budget)
    ordered = sorted(group, key=lambda s: -s.completion_tokens)
    room = max(budget - group[0].before, 1)
    fewest = max(-(-len(group) // largest), -(-sum(s.completion_tokens for s in group) // room))
    for count in range(min(fewest, len(group)), len(group) + 1):
        if count_tokens(ordered[::count]) <= budget:  # the largest chunk
            break
    return [ordered[i::count] for i in range(count)]


def split_forked_group(group: list[SequenceSize], largest: int, budget: int) -> list[list[SequenceSize]]:
    """Splits a group as `split_group` does, where its tree of turns is walked from branch to branch."""
    ordered = sorted(group, key=lambda s: (s.stems, s.sample))
    for count in range(-(-len(ordered) // largest), len(ordered) + 1):
        ends = [len(ordered) * i // count for i in range(count + 1)]
        chunks = [ordered[start:end] for start, end in pairwise(ends)]
        if all(len(chunk) == 1 or count_tokens(chunk) <= budget for chunk in chunks):
            break
    return chunks


def fill_bins(sizes: list[int], costs: list[float], ranks: int, budget: int) -> list[list[int]]:
    """Puts items into bins under a budget of size: the most expensive item first, always into the cheapest bin.

    Makes as few bins as possible, a multiple of `ranks`. An item that alone exceeds the budget has a bin of its own.
    fill_bins([5, 3, 3, 1], [5, 3, 3, 1], ranks=2, budget=6) -> [[0, 3], [1, 2]]
    """
    halves = sum(2 * size > budget for size in sizes)  # no two of these fit into one bin
    fewest = max(min(-(-sum(sizes) // budget), len(sizes)), halves, 1)  # one bin per item always suffices
    count = -(-fewest // ranks) * ranks
    order = sorted(range(len(sizes)), key=lambda i: (-costs[i], i))
    while True:
        heap = [(0.0, b) for b in range(count)]
        bins: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            filled, b = heapq.heappop(heap)
            bins[b].append(i)
            heapq.heappush(heap, (filled + costs[i], b))
        if all(len(b) <= 1 or sum(sizes[i] for i in b) <= budget for b in bins):
            return [sorted(b) for b in bins]
        count += -(-count // (50 * ranks)) * ranks  # 2 % more


def deal_out(packs: list[CostedPack], ranks: int) -> list[list[CostedPack]]:
    """Deals packs out to ranks, the most expensive first, in alternating direction, so that no rank always gets the first.

    Costs 6 5 4 3 2 1 to two ranks: 6 3 2 and 5 4 1.
    """
    ordered = sorted(packs, key=itemgetter(0), reverse=True)
    rounds = [ordered[i : i + ranks][:: 1 - 2 * (i // ranks % 2)] for i in range(0, len(ordered), ranks)]
    return [list(rank_packs) for rank_packs in zip(*rounds, strict=True)]
