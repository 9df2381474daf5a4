"""Who computes what: sequences to packs and packs to ranks, by what they cost. Samples of one prompt go together where that saves work."""

import functools
import heapq
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

# Of query and key, that cost as much as a token's linear layers, in a model whose shape is not known: one of 2 billion parameters.
DEFAULT_PAIRS_PER_TOKEN = 16384.0


class SequenceSize(NamedTuple):
    """A sequence to be computed, by its input tokens. `Sized(sample=17, family=2, prompt=256, own=63)`"""

    sample: int
    prompt_group: int  # those of one family have the same prompt, which a pack computes once
    prompt_tokens: int
    completion_tokens: int


def count_tokens(some: Sequence[SequenceSize]) -> int:
    """What these are in one pack."""
    return sum({s.prompt_group: s.prompt_tokens for s in some}.values()) + sum(s.completion_tokens for s in some)


def count_attention_pairs(some: Sequence[SequenceSize]) -> float:
    """Of query and key that attention looks at, when these are in one pack."""
    of_prompts = sum(p * p for p in {s.prompt_group: s.prompt_tokens for s in some}.values()) / 2
    return of_prompts + sum(s.completion_tokens * (s.prompt_tokens + s.completion_tokens / 2) for s in some)


def pack_cost(some: Sequence[SequenceSize], pairs_per_token: float) -> float:
    """What it takes to compute these in one pack, in tokens without attention.

    A prompt of 2048 tokens and a completion of 1024, 8192 pairs per token: 3072 + (2048² / 2 + 1024 · 2048 + 1024² / 2) / 8192 = 3648
    """
    return count_tokens(some) + count_attention_pairs(some) / pairs_per_token


def assign_to_ranks(
    some: Iterable[SequenceSize], ranks: int, budget: int, pairs_per_token: float = DEFAULT_PAIRS_PER_TOKEN
) -> list[list[list[int]]]:
    """Samples to packs under a budget of tokens, `[rank][i]`: every rank gets equally many packs, of about the same cost.

    Small parts of families balance ranks best, and repeat prompts most. Of some sizes of parts that one is taken with which
    the rank that has most to do is done first.
    """
    dear = functools.partial(pack_cost, pairs_per_token=pairs_per_token)
    families: dict[int, list[SequenceSize]] = {}
    for s in some:
        families.setdefault(s.prompt_group, []).append(s)
    ideal = sum(map(dear, families.values())) / ranks
    best, least, largest = [], float("inf"), max(map(len, families.values()), default=1)
    if sum(map(len, families.values())) <= ranks:
        largest = 1  # nothing is done sooner than each by a rank of its own
    parts: list[list[SequenceSize]] = []
    while largest and least > 1.02 * ideal:
        cuts = [part for family in families.values() for part in split_group(family, largest, budget)]
        largest //= 2
        if cuts and len(cuts) == len(parts):
            continue  # the budget leaves no other choice
        parts = cuts
        bins = fill_bins([count_tokens(p) for p in parts], [dear(p) for p in parts], ranks, budget)
        packs = [[s for i in b for s in parts[i]] for b in bins]
        priced = sorted(((dear(p), p) for p in packs), key=itemgetter(0), reverse=True)
        # There and back again, so that no rank always gets the dearest.
        rows = [priced[i : i + ranks][:: 1 - 2 * (i // ranks % 2)] for i in range(0, len(priced), ranks)]
        dealt = [list(own) for own in zip(*rows, strict=True)]
        slowest = max(sum(price for price, _ in own) for own in dealt)
        if slowest < least:
            best, least = dealt, slowest
    return [[[s.sample for s in own] for _, own in rank] for rank in best]


def split_group(family: list[SequenceSize], largest: int, budget: int) -> list[list[SequenceSize]]:
    """A family in parts of so many at most, and under the budget unless a sequence alone is not; about equally dear."""
    ordered = sorted(family, key=lambda s: -s.completion_tokens)
    room = max(budget - family[0].prompt_tokens, 1)
    fewest = max(-(-len(family) // largest), -(-sum(s.completion_tokens for s in family) // room))
    for count in range(min(fewest, len(family)), len(family) + 1):
        if count_tokens(ordered[::count]) <= budget:  # the largest part
            break
    return [ordered[i::count] for i in range(count)]


def fill_bins(sizes: list[int], costs: list[float], ranks: int, budget: int) -> list[list[int]]:
    """Things into bins under a budget of their sizes, as few as fill all ranks equally often; the dearest first into the cheapest.

    spread([5, 3, 3, 1], [5, 3, 3, 1], ranks=2, budget=6) -> [[0, 3], [1, 2]]
    """
    halves = sum(2 * size > budget for size in sizes)  # no two of which share a bin
    least = max(min(-(-sum(sizes) // budget), len(sizes)), halves, 1)  # a bin for each is enough, whatever their sizes
    count = -(-least // ranks) * ranks
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
