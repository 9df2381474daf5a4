from rlsys.tasks.builtin import ROWS


def test_seeds_are_whole_numbers_and_none_is_held_out_and_trained_on():
    train, held_out = ([row["seed"] for row in ROWS[name](name)] for name in ("seeds", "seeds_heldout"))
    assert train == list(range(10_000))
    assert len(held_out) == 100
    assert not set(train) & set(held_out)
