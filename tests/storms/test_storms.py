"""A minute of storms, and proof that storms find faults."""

import pytest
from planted import PLANTED
from run import storm
from schedules import run_schedule
from worlds import WORLDS

SCHEDULES = 1000


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    planted = PLANTED[name]
    with planted.in_place():
        for seed in [planted.seed, *range(SCHEDULES)]:
            if run_schedule(WORLDS[planted.world], seed).problem:
                return
    pytest.fail(f"{SCHEDULES} schedules do not find it")


@pytest.mark.parametrize("world", WORLDS)
def test_a_schedule_replays(world):
    first, again = (run_schedule(WORLDS[world], 7) for _ in range(2))
    assert first.timeline
    assert first == again


def test_nothing_breaks_in_a_minute_of_storms():
    outcomes = storm(list(WORLDS), 10_000, first=100_000, processes=2, limit_s=60)
    assert {o.world for o in outcomes} == set(WORLDS)
    assert not [o.problem for o in outcomes if o.problem]
