"""Who samples what, in the order and with the company that costs least."""

from rlsys.types import Request
from workers.rollout.request_scheduler import RequestScheduler


def requests(*sizes: int) -> list[Request]:
    """Groups a, b, … of these sizes."""
    return [Request("abcdefgh"[g], i, [2], 0, 1.0, 7) for g, size in enumerate(sizes) for i in range(size)]


def names(share: list[Request]) -> str:
    return " ".join(f"{r.uid}{r.index}" for r in share)


def dealt(work: RequestScheduler, **holding: int) -> dict[str, str]:
    return {name: names(share) for name, share in work.assign(holding).items()}


def test_whole_groups_go_round_the_engines_the_first_ones_first():
    work = RequestScheduler(requests(2, 2, 2, 2), max_running=8)
    assert dealt(work, x=0, y=0) == {"x": "a0 a1 c0 c1", "y": "b0 b1 d0 d1"}


def test_an_engine_holds_no_more_than_it_decodes_at_once_and_a_quarter():
    work = RequestScheduler(requests(4, 4, 4, 4), max_running=4)
    assert dealt(work, x=0) == {"x": "a0 a1 a2 a3 b0"}
    assert dealt(work, x=5) == {}
    assert dealt(work, x=4) == {"x": "b1"}, "it goes on with the group that it has begun"


def test_an_engine_is_not_asked_for_each_sample_that_it_has_finished():
    work = RequestScheduler(requests(8, 8, 8), max_running=8)
    assert dealt(work, x=0) == {"x": "a0 a1 a2 a3 a4 a5 a6 a7 b0 b1"}
    assert dealt(work, x=10) == {}
    work = RequestScheduler(requests(32, 32), max_running=16)
    assert len(work.assign({"x": 0})["x"]) == 20
    assert dealt(work, x=19) == {}, "half of the reserve of four is still there"
    assert dealt(work, x=18) == {"x": "a20 a21"}


def test_who_has_room_takes_the_next_group():
    work = RequestScheduler(requests(4, 4, 4, 4), max_running=4)
    assert dealt(work, x=0, y=0) == {"x": "a0 a1 a2 a3 c0", "y": "b0 b1 b2 b3 d0"}
    work = RequestScheduler(requests(5, 5, 2, 2), max_running=4)
    assert dealt(work, x=0, y=0) == {"x": "a0 a1 a2 a3 a4", "y": "b0 b1 b2 b3 b4"}
    assert dealt(work, x=5, y=1) == {"y": "c0 c1 d0 d1"}, "x is slow, y is not"


def test_at_the_end_who_is_free_takes_from_a_group_that_another_has_begun():
    work = RequestScheduler(requests(11), max_running=4)
    assert dealt(work, x=0) == {"x": "a0 a1 a2 a3 a4"}
    assert dealt(work, x=5, y=0) == {"y": "a8 a9 a10 a6 a7"}
    assert dealt(work, x=4, y=5) == {}, "what is left would only wait"
    assert dealt(work, x=3, y=5) == {"x": "a5"}
    assert dealt(work, x=0, y=0) == {}


def test_what_a_lost_engine_had_goes_to_who_has_room_before_anything_else():
    work = RequestScheduler(requests(5, 5, 5), max_running=4)
    [(_, lost)] = work.assign({"x": 0}).items()
    work.requeue(lost[2:])
    assert dealt(work, y=0) == {"y": "a2 a3 a4 b0 b1"}


def test_every_request_is_dealt_once():
    asked = requests(3, 7, 1, 9, 4)
    work, holding, seen = RequestScheduler(asked, max_running=3), {"x": 0, "y": 0, "z": 0}, []
    for step in range(200):
        for name, share in work.assign(holding).items():
            holding[name] += len(share)
            seen += share
        name = "xyz"[step % 3 if step % 2 else 0]
        holding[name] = max(0, holding[name] - 1)
    assert sorted(names([r]) for r in seen) == sorted(names([r]) for r in asked)
