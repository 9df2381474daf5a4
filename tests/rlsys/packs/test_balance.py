"""Who computes what: budgets, balance, and prompts that are not computed twice where once would do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.models.shapes import model_shape, pairs_per_token
from rlsys.packs.balance import SequenceSize, assign_to_ranks, count_tokens, fill_bins, pack_cost

SIZES = st.lists(st.integers(1, 20), max_size=25)
SOME = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=25).map(
    lambda rows: [SequenceSize(i, family, 1 + family * 3, own) for i, (family, own) in enumerate(rows)]
)


@given(SIZES, st.integers(1, 4), st.integers(1, 40))
def test_every_thing_is_in_one_bin_and_bins_keep_the_budget(sizes, ranks, budget):
    bins = fill_bins(sizes, [s**2 for s in sizes], ranks, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert len(bins) % ranks == 0
    assert 0 < len(bins) <= max(-(-len(sizes) // ranks), 1) * ranks, "a bin for each is enough"
    for b in bins:
        assert sum(sizes[i] for i in b) <= budget or len(b) == 1


@given(SIZES, st.integers(1, 4))
def test_a_budget_for_everything_needs_one_bin_per_rank_and_fills_them_alike(sizes, ranks):
    bins = fill_bins(sizes, sizes, ranks, budget=1000)
    assert len(bins) == ranks
    loads = [sum(sizes[i] for i in b) for b in bins]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_example_in_the_docstring():
    assert fill_bins([5, 3, 3, 1], [5, 3, 3, 1], ranks=2, budget=6) == [[0, 3], [1, 2]]


def test_the_cost_of_a_prompt_and_a_completion_by_hand():
    alone = [SequenceSize(0, 0, 2048, 1024)]
    assert pack_cost(alone, 8192) == 3072 + (2048**2 / 2 + 1024 * 2048 + 1024**2 / 2) / 8192 == 3648
    assert count_tokens([*alone, SequenceSize(1, 0, 2048, 1024)]) == 4096, "the prompt is there once"
    assert count_tokens([*alone, SequenceSize(1, 1, 2048, 1024)]) == 6144
    assert pack_cost([*alone, SequenceSize(1, 1, 2048, 1024)], 8192) == 2 * pack_cost(alone, 8192)


@given(SOME, st.integers(1, 4), st.integers(1, 60))
def test_every_sample_is_dealt_once_and_every_rank_gets_as_many_packs_within_the_budget(some, ranks, budget):
    dealt = assign_to_ranks(some, ranks, budget)
    assert len(dealt) == ranks
    assert len({len(own) for own in dealt}) == 1
    assert sorted(i for own in dealt for p in own for i in p) == list(range(len(some)))
    assert all(len(p) <= 1 or count_tokens([some[i] for i in p]) <= budget for own in dealt for p in own)
    assert assign_to_ranks(some, ranks, budget) == dealt


def test_samples_of_a_prompt_stay_together_where_that_saves_work():
    some = [SequenceSize(i, i % 4, prompt_tokens=100, completion_tokens=10) for i in range(16)]
    for dealt in (assign_to_ranks(some, ranks=2, budget=10_000), assign_to_ranks(some, ranks=1, budget=300)):
        packs = [p for own in dealt for p in own]
        assert all(sum(f in {i % 4 for i in p} for p in packs) == 1 for f in range(4)), "every prompt in one pack only"


def test_one_large_family_is_cut_rather_than_leave_ranks_idle():
    dealt = assign_to_ranks(
        [SequenceSize(i, 0, prompt_tokens=10, completion_tokens=100) for i in range(8)], ranks=4, budget=10_000
    )
    assert [[len(p) for p in own] for own in dealt] == [[2]] * 4


def test_a_family_beyond_the_budget_is_cut_and_its_prompt_repeated():
    some = [SequenceSize(i, 0, prompt_tokens=50, completion_tokens=20) for i in range(6)]
    dealt = assign_to_ranks(some, ranks=1, budget=100)
    assert sorted(len(p) for p in dealt[0]) == [2, 2, 2]


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-7B"])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_balanced_by_what_sequences_cost_and_not_by_their_tokens(seed, model):
    """A few long sequences among many short ones: equal numbers of tokens are unequal work, more so in small models."""
    work = model_shape(model)[0].flop_counter
    rng = np.random.default_rng(seed)
    own = np.concatenate([rng.integers(4000, 8000, 6), rng.integers(50, 500, 150)])
    some = [SequenceSize(i, i, 100, int(n)) for i, n in enumerate(own)]

    def slowest(dealt: list[list[list[int]]]) -> float:
        costs = [
            sum(work.forward_flops(0, 100 + some[i].completion_tokens, 0) for p in rank for i in p) for rank in dealt
        ]
        return max(costs) * len(costs) / sum(costs)

    by_count = [[list(range(rank, len(some), 4))] for rank in range(4)]
    by_tokens = [
        [b]
        for b in fill_bins(
            [s.prompt_tokens + s.completion_tokens for s in some],
            [s.prompt_tokens + s.completion_tokens for s in some],
            4,
            10**6,
        )
    ]
    by_cost = assign_to_ranks(some, 4, 10**6, pairs_per_token(model))
    assert slowest(by_cost) < 1.01
    assert slowest(by_cost) < slowest(by_tokens) < slowest(by_count)
