"""How sequences are assigned to packs and ranks: budgets, balance, and prompts that are computed only once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.batching.balance import SequenceSize, assign_to_ranks, count_tokens, fill_bins, pack_cost
from rlsys.models.lookup import model_shape, pairs_per_token

SIZES = st.lists(st.integers(1, 20), max_size=25)
SEQUENCES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=25).map(
    lambda rows: [SequenceSize(i, group, 1 + group * 3, tokens) for i, (group, tokens) in enumerate(rows)]
)


@given(SIZES, st.integers(1, 4), st.integers(1, 40))
def test_every_item_is_in_one_bin_and_bins_keep_the_budget(sizes, ranks, budget):
    bins = fill_bins(sizes, [s**2 for s in sizes], ranks, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert len(bins) % ranks == 0
    assert 0 < len(bins) <= max(-(-len(sizes) // ranks), 1) * ranks, "a bin for each is enough"
    for b in bins:
        assert sum(sizes[i] for i in b) <= budget or len(b) == 1


@given(SIZES, st.integers(1, 4))
def test_a_large_budget_needs_one_bin_per_rank_and_fills_them_equally(sizes, ranks):
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


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 60))
def test_every_sample_is_assigned_once_to_equally_many_packs_per_rank(sequences, ranks, budget):
    assigned = assign_to_ranks(sequences, ranks, budget)
    assert len(assigned) == ranks
    assert len({len(rank_packs) for rank_packs in assigned}) == 1
    assert sorted(i for rank_packs in assigned for p in rank_packs for i in p) == list(range(len(sequences)))
    assert all(
        len(p) <= 1 or count_tokens([sequences[i] for i in p]) <= budget for rank_packs in assigned for p in rank_packs
    )
    assert assign_to_ranks(sequences, ranks, budget) == assigned


def test_samples_of_a_prompt_stay_together_where_that_saves_work():
    sequences = [SequenceSize(i, i % 4, prompt_tokens=100, completion_tokens=10) for i in range(16)]
    for assigned in (
        assign_to_ranks(sequences, ranks=2, budget=10_000),
        assign_to_ranks(sequences, ranks=1, budget=300),
    ):
        packs = [p for rank_packs in assigned for p in rank_packs]
        assert all(sum(f in {i % 4 for i in p} for p in packs) == 1 for f in range(4)), "every prompt in one pack only"


def test_one_large_group_is_split_rather_than_leaving_ranks_idle():
    assigned = assign_to_ranks(
        [SequenceSize(i, 0, prompt_tokens=10, completion_tokens=100) for i in range(8)], ranks=4, budget=10_000
    )
    assert [[len(p) for p in rank_packs] for rank_packs in assigned] == [[2]] * 4


def test_a_group_beyond_the_budget_is_split_and_its_prompt_repeated():
    sequences = [SequenceSize(i, 0, prompt_tokens=50, completion_tokens=20) for i in range(6)]
    assigned = assign_to_ranks(sequences, ranks=1, budget=100)
    assert sorted(len(p) for p in assigned[0]) == [2, 2, 2]


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-7B"])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_balanced_by_cost_and_not_by_tokens(seed, model):
    """A few long sequences among many short ones: equal token counts are unequal work, above all in small models."""
    work = model_shape(model)[0].flop_counter
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([rng.integers(4000, 8000, 6), rng.integers(50, 500, 150)])
    sequences = [SequenceSize(i, i, 100, int(n)) for i, n in enumerate(lengths)]

    def slowest(assigned: list[list[list[int]]]) -> float:
        costs = [
            sum(work.forward_flops(0, 100 + sequences[i].completion_tokens, 0) for p in rank for i in p)
            for rank in assigned
        ]
        return max(costs) * len(costs) / sum(costs)

    by_count = [[list(range(rank, len(sequences), 4))] for rank in range(4)]
    by_tokens = [
        [b]
        for b in fill_bins(
            [s.prompt_tokens + s.completion_tokens for s in sequences],
            [s.prompt_tokens + s.completion_tokens for s in sequences],
            4,
            10**6,
        )
    ]
    by_cost = assign_to_ranks(sequences, 4, 10**6, pairs_per_token(model))
    assert slowest(by_cost) < 1.01
    assert slowest(by_cost) < slowest(by_tokens) < slowest(by_count)
