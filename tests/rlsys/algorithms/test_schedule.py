import itertools

import pytest

from rlsys.algorithms.schedule import learning_rate


def rates(count: int, **options) -> list[float]:
    return [learning_rate(n, **({"peak": 8.0, "warmup": 0} | options)) for n in range(count)]


def test_the_warm_up_rises_in_equal_steps_and_starts_above_zero():
    assert rates(6, schedule="constant", warmup=4, total=6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_constant_stays_constant():
    assert rates(5, schedule="constant", total=3) == [8.0] * 5


def test_linear_falls_in_equal_steps_to_zero_at_the_end():
    assert rates(6, schedule="linear", total=4) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_cosine_is_half_way_down_at_half_time_and_zero_at_the_end():
    result = rates(6, schedule="cosine", total=4)
    assert result == pytest.approx([8.0, 4 * (1 + 0.5**0.5), 4.0, 4 * (1 - 0.5**0.5), 0.0, 0.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_decay_begins_where_the_warm_up_ends(schedule):
    result = rates(12, schedule=schedule, warmup=2, total=12)
    assert result[:3] == [4.0, 8.0, 8.0]
    assert all(a > b > 0 for a, b in itertools.pairwise(result[2:]))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_longer_than_the_run_only_rises(schedule):
    assert rates(3, schedule=schedule, warmup=8, total=3) == [1.0, 2.0, 3.0]
