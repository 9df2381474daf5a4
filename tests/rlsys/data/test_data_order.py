"""The order of rows in the training stream."""

from collections import Counter

import pytest
from fakes import make_dataset
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data import Dataset, ShuffledOrder, WeightedOrder
from rlsys.data.order import BLOCK, split_proportionally

# --- one set, or several end to end ----------------------------------------------------------------------------------------


def test_an_epoch_has_every_prompt_once():
    taken = make_dataset(12).take(0, 36)
    for epoch in range(3):
        rows = [p.text for p in taken[12 * epoch : 12 * epoch + 12]]
        assert len(set(rows)) == 12


def test_each_epoch_has_its_own_order_and_each_seed_too():
    texts = [p.text for p in make_dataset(12).take(0, 24)]
    assert texts[:12] != texts[12:]
    assert texts[:12] != [p.text for p in make_dataset(12, seed=1).take(0, 12)]


def test_the_order_depends_on_seed_and_position_only():
    whole = make_dataset(12).take(0, 60)
    jumping = make_dataset(12)
    for position, count in ((40, 9), (0, 5), (11, 3), (23, 30), (40, 9)):
        assert jumping.take(position, count) == whole[position : position + count]


def test_the_order_of_earlier_versions_is_kept():
    import random

    expected = list(range(50))
    random.Random("7 epoch 2").shuffle(expected)
    order = ShuffledOrder(50, seed=7)
    assert [order(100 + i) for i in range(50)] == [(row, 2) for row in expected]


def test_without_shuffling_prompts_come_as_in_the_file():
    dataset = make_dataset(5, shuffle=False)
    assert [p.uid.split("#")[0] for p in dataset.take(3, 5)] == [dataset.prompts[i].uid for i in (3, 4, 0, 1, 2)]


def test_every_use_of_a_row_has_its_own_uid():
    uids = Counter(p.uid for p in make_dataset(5).take(0, 30))
    assert max(uids.values()) == 1
    assert "zigzag:3#0" in uids
    assert "zigzag:3#5" in uids


# --- several by weight -----------------------------------------------------------------------------------------------------

SETS = {"a": 7, "b": 3, "c": 40}


def test_every_block_has_the_exact_shares():
    order = WeightedOrder(SETS, [1, 1, 2], seed=0)
    for block in range(3):
        rows = [order(BLOCK * block + i)[0] for i in range(BLOCK)]
        assert Counter("a" if r < 7 else "b" if r < 10 else "c" for r in rows) == {"a": 250, "b": 250, "c": 500}


def test_each_set_goes_through_its_own_epochs():
    order = WeightedOrder(SETS, [1, 1, 2], seed=0)
    uses = [order(i) for i in range(2 * BLOCK)]
    for first, rows in ((0, 7), (7, 3), (10, 40)):
        own = [(row, epoch) for row, epoch in uses if first <= row < first + rows]
        for epoch in range(len(own) // rows):
            part = own[epoch * rows : (epoch + 1) * rows]
            assert {row for row, _ in part} == set(range(first, first + rows))
            assert {e for _, e in part} == {epoch}
        assert len(set(own)) == len(own)


@given(st.lists(st.tuples(st.integers(0, 5 * BLOCK), st.integers(1, 40)), max_size=6), st.integers(0, 3), st.booleans())
def test_taking_anywhere_gives_the_same_as_taking_everything(jumps, seed, shuffle):
    whole = WeightedOrder(SETS, [0.6, 0.3, 0.1], seed=seed, shuffle=shuffle)
    jumping = WeightedOrder(SETS, [0.6, 0.3, 0.1], seed=seed, shuffle=shuffle)
    for position, count in jumps:
        assert [jumping(p) for p in range(position, position + count)] == [
            whole(p) for p in range(position, position + count)
        ]


def test_seeds_change_the_order_and_unshuffled_sets_are_evenly_spread():
    first = [WeightedOrder(SETS, [1, 1, 2], seed=0)(i) for i in range(100)]
    assert first == [WeightedOrder(SETS, [1, 1, 2], seed=0)(i) for i in range(100)]
    assert first != [WeightedOrder(SETS, [1, 1, 2], seed=1)(i) for i in range(100)]
    even = WeightedOrder({"a": 4, "b": 4}, [3, 1], seed=0, shuffle=False)
    assert [even(i)[0] for i in range(8)] == [0, 1, 4, 2, 3, 0, 5, 1]


def test_a_new_set_leaves_the_order_within_the_others_alone():
    two, three = WeightedOrder({"a": 7, "b": 3}, [1, 1], seed=0), WeightedOrder(SETS, [1, 1, 2], seed=0)

    def of_a(order):
        return [row for row, _ in map(order, range(BLOCK)) if row < 7][:200]

    assert of_a(two) == of_a(three)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=12))
def test_shares_are_whole_numbers_near_the_weights(weights):
    counts = split_proportionally(weights)
    assert sum(counts) == BLOCK
    assert min(counts) >= 1
    for weight, count in zip(weights, counts, strict=True):
        exact = weight / sum(weights) * BLOCK
        assert count >= exact - len(weights)
        assert count <= max(exact + 1, 1)


@pytest.mark.parametrize(
    ("weights", "counts"), [([3, 1], [750, 250]), ([1, 1, 1], [334, 333, 333]), ([1e6, 1], [999, 1])]
)
def test_shares_by_hand(weights, counts):
    assert split_proportionally(weights) == counts


def test_a_weighted_dataset_names_every_use_differently():
    prompts = [*make_dataset(4, source="a").prompts, *make_dataset(3, source="b").prompts]
    dataset = Dataset(prompts, order=WeightedOrder({"a": 4, "b": 3}, [1, 3], seed=0))
    uids = [p.uid for p in dataset.take(0, 500)]
    assert len(set(uids)) == 500
    assert sum(uid.startswith("b:") for uid in dataset_uids(dataset, BLOCK)) == 750
    assert len(dataset) == 7


def dataset_uids(dataset, count):
    return [p.uid for p in dataset.take(0, count)]
