from launch.tools.analysis.run_events import last_ending, parse_events


def parse(*events):
    """`parse(("sync", {"version": 3}))`: events one second apart."""
    return parse_events([{"time": float(i), "event": kind, **facts} for i, (kind, facts) in enumerate(events)])


def test_an_event_without_a_step_follows_the_newest_weights():
    events = parse(
        ("start", {}), ("begin", {"step": 0}), ("sync", {"version": 4}), ("replaced", {"worker": "rollout-1"})
    )
    assert [(h.kind, h.step) for h in events] == [("start", 0), ("begin", 0), ("sync", 4), ("replaced", 5)]


def test_after_a_restart_steps_count_from_the_checkpoint():
    events = parse(("sync", {"version": 9}), ("restart", {"cause": "x"}), ("resume", {"step": 6}), ("stall", {}))
    assert [h.step for h in events] == [9, 10, 6, 7]


def test_an_event_that_names_its_step_keeps_it():
    [failure] = parse(("reward failure", {"step": 7, "reason": "timeout"}))
    assert (failure.step, failure.facts) == (7, {"reason": "timeout"})


def test_only_a_stop_on_request_is_no_problem():
    requested, fell = parse(("stop", {"cause": "stop requested", "step": 3}), ("stop", {"cause": "OSError: no space"}))
    assert (requested.tone, fell.tone) == ("warning", "problem")


def test_unknown_and_broken_events_are_notes():
    strange, empty = parse_events([{"event": "comet", "time": 1.0, "tail": 2}, {}])
    assert (strange.title, strange.tone, strange.facts) == ("comet", "note", {"tail": 2})
    assert empty.tone == "note"


def test_a_run_has_an_ending_until_it_is_started_again():
    assert last_ending(parse(("begin", {"step": 0}))) is None
    assert last_ending(parse(("begin", {"step": 0}), ("done", {"step": 3}))).kind == "done"
    assert last_ending(parse(("stop", {"cause": "stop requested"}), ("start", {}))) is None
    assert last_ending([]) is None
