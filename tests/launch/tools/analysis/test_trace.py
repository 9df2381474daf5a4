import itertools
import json

import pytest

from launch.tools.analysis.trace import Span, busy_seconds, read_spans, trace_events, write_trace
from rlsys.errors import ConfigError


def make_run(tmp_path, **workers):
    (tmp_path / "logs").mkdir()
    for name, lines in workers.items():
        text = "".join("\n" + json.dumps(line) for line in lines)
        (tmp_path / "logs" / f"{name.replace('_', '-')}.spans").write_text(text)
    return tmp_path


RUN = {
    "driver": [
        {"span": "rollout", "at": 100.0, "s": 2.0},
        {"span": "step", "at": 100.0, "s": 3.0, "step": 1},
        {"span": "sync", "at": 102.0, "s": 1.0},
    ],
    "rollout_0": [
        {
            "span": "generate",
            "at": 100.1,
            "s": 1.5,
            "requests": [["a", 0, 0], ["a", 1, 0]],
            "samples": [["a", 0, 0.5, 3], ["a", 1, 1.5, 9]],
        },
        {"span": "take", "at": 102.5, "s": 0.25, "version": 1},
    ],
    "reward_0": [
        {"span": "judge", "at": 100.6, "s": 0.5},
        {"span": "judge", "at": 100.8, "s": 0.5},
        {"span": "judge", "at": 101.2, "s": 0.1},
    ],
}


def named(drawn, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in drawn if e["ph"] == "M" and e["name"] == kind}


def test_the_trace_has_a_process_per_worker_and_one_for_syncs(tmp_path):
    count = write_trace(make_run(tmp_path, **RUN), tmp_path / "out" / "trace.json")
    drawn = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert list(named(drawn, "process_name").values()) == ["driver", "reward-0", "rollout-0", "syncs"]
    whole = [e for e in drawn if e["ph"] == "X"]
    assert count == len(whole) == 3 + 2 + 2 + 3 + 2  # each worker's, two samples, and the syncs again
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in whole)
    [take, again] = [e for e in whole if e["name"] == "take"]
    assert (take["ts"], take["dur"], take["args"]) == (2.5e6, 0.25e6, {"version": 1})
    assert again["pid"] != take["pid"]


def test_each_sample_has_a_lane_below_its_engine(tmp_path):
    drawn = trace_events(read_spans(make_run(tmp_path, **RUN)))
    lanes = named(drawn, "thread_name")
    samples = {e["name"]: e for e in drawn if e["ph"] == "X" and "/" in e["name"]}
    assert {lanes[e["pid"], e["tid"]] for e in samples.values()} == {"sample 0", "sample 1"}
    assert samples["a/0"]["dur"] == 0.5e6
    assert samples["a/1"]["args"] == {"tokens": 9}
    assert next(e for e in drawn if e["name"] == "generate")["args"] == {"requests": 2, "samples": 2}


def test_overlapping_spans_have_lanes_and_nested_spans_share_one(tmp_path):
    drawn = trace_events(read_spans(make_run(tmp_path, **RUN)))
    lanes = named(drawn, "thread_name")
    judged = [lanes[e["pid"], e["tid"]] for e in drawn if e["name"] == "judge"]
    assert sorted(judged) == ["reward-0 0", "reward-0 0", "reward-0 1"]
    drivers = {(e["pid"], e["tid"]) for e in drawn if e["ph"] == "X" and e["name"] in ("step", "rollout")}
    assert len(drivers) == 1


def test_no_two_spans_of_a_lane_cross(tmp_path):
    drawn = [e for e in trace_events(read_spans(make_run(tmp_path, **RUN))) if e["ph"] == "X"]
    for a, b in itertools.permutations(drawn, 2):
        if (a["pid"], a["tid"]) == (b["pid"], b["tid"]) and a["ts"] < b["ts"] < a["ts"] + a["dur"]:
            assert b["ts"] + b["dur"] <= a["ts"] + a["dur"]


def test_a_process_is_busy_while_anything_goes_on_in_it():
    judged = [
        Span("reward-0", "judge", at, seconds) for at, seconds in ((1.0, 2.0), (2.0, 0.5), (2.5, 1.5), (6.0, 1.0))
    ]
    assert busy_seconds(judged, 0.0, 10.0) == 3.0 + 1.0
    assert busy_seconds(judged, 2.0, 6.5) == 2.0 + 0.5
    assert busy_seconds([], 0.0, 10.0) == 0.0


def test_a_run_without_a_timeline_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="has no timeline"):
        write_trace(tmp_path, tmp_path / "trace.json")
