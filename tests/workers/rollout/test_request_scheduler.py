"""Which engine gets which requests, and when."""

from rlsys.types import Request
from workers.rollout.request_scheduler import RequestScheduler


def make_requests(*sizes: int) -> list[Request]:
    """Requests of groups a, b, … with these sizes."""
    return [Request("abcdefgh"[g], i, [2], 0, 1.0, 7) for g, size in enumerate(sizes) for i in range(size)]


def names(requests: list[Request]) -> str:
    return " ".join(f"{r.uid}{r.index}" for r in requests)


def assign(scheduler: RequestScheduler, **running: int) -> dict[str, str]:
    return {name: names(requests) for name, requests in scheduler.assign(running).items()}


def test_whole_groups_go_to_the_engines_in_turn():
    scheduler = RequestScheduler(make_requests(2, 2, 2, 2), max_running=8)
    assert assign(scheduler, x=0, y=0) == {"x": "a0 a1 c0 c1", "y": "b0 b1 d0 d1"}


def test_an_engine_holds_what_it_decodes_at_once_and_a_quarter_more():
    scheduler = RequestScheduler(make_requests(4, 4, 4, 4), max_running=4)
    assert assign(scheduler, x=0) == {"x": "a0 a1 a2 a3 b0"}
    assert assign(scheduler, x=5) == {}
    assert assign(scheduler, x=4) == {"x": "b1"}, "the engine goes on with its current group"


def test_an_engine_gets_no_request_for_each_single_finished_sample():
    scheduler = RequestScheduler(make_requests(8, 8, 8), max_running=8)
    assert assign(scheduler, x=0) == {"x": "a0 a1 a2 a3 a4 a5 a6 a7 b0 b1"}
    assert assign(scheduler, x=10) == {}
    scheduler = RequestScheduler(make_requests(32, 32), max_running=16)
    assert len(scheduler.assign({"x": 0})["x"]) == 20
    assert assign(scheduler, x=19) == {}, "half of the reserve of four is still there"
    assert assign(scheduler, x=18) == {"x": "a20 a21"}


def test_the_engine_with_room_gets_the_next_group():
    scheduler = RequestScheduler(make_requests(4, 4, 4, 4), max_running=4)
    assert assign(scheduler, x=0, y=0) == {"x": "a0 a1 a2 a3 c0", "y": "b0 b1 b2 b3 d0"}
    scheduler = RequestScheduler(make_requests(5, 5, 2, 2), max_running=4)
    assert assign(scheduler, x=0, y=0) == {"x": "a0 a1 a2 a3 a4", "y": "b0 b1 b2 b3 b4"}
    assert assign(scheduler, x=5, y=1) == {"y": "c0 c1 d0 d1"}, "x is slow, y is not"


def test_at_the_end_a_free_engine_takes_from_the_group_of_another():
    scheduler = RequestScheduler(make_requests(11), max_running=4)
    assert assign(scheduler, x=0) == {"x": "a0 a1 a2 a3 a4"}
    assert assign(scheduler, x=5, y=0) == {"y": "a8 a9 a10 a6 a7"}
    assert assign(scheduler, x=4, y=5) == {}, "the rest would only wait in an engine"
    assert assign(scheduler, x=3, y=5) == {"x": "a5"}
    assert assign(scheduler, x=0, y=0) == {}


def test_the_requests_of_a_lost_engine_are_retried_before_all_others():
    scheduler = RequestScheduler(make_requests(5, 5, 5), max_running=4)
    [(_, lost)] = scheduler.assign({"x": 0}).items()
    scheduler.requeue(lost[2:])
    assert assign(scheduler, y=0) == {"y": "a2 a3 a4 b0 b1"}


def test_every_request_is_assigned_once():
    requests = make_requests(3, 7, 1, 9, 4)
    scheduler, running, assigned = RequestScheduler(requests, max_running=3), {"x": 0, "y": 0, "z": 0}, []
    for step in range(200):
        for name, share in scheduler.assign(running).items():
            running[name] += len(share)
            assigned += share
        name = "xyz"[step % 3 if step % 2 else 0]
        running[name] = max(0, running[name] - 1)
    assert sorted(names([r]) for r in assigned) == sorted(names([r]) for r in requests)
