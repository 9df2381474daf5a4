"""The lanes: what each worker did at which time."""

import pytest
from made_run import BEGAN, make_run, write_lines
from reports import report_data

from launch.tools.analysis.trace import assign_lanes, fits_inside
from launch.tools.analysis.trace import read_spans as recorded
from launch.tools.report.lanes import worker_lanes
from rlsys.runs.directory import read_lines


def test_lanes_are_those_of_the_last_steps(tmp_path):
    lanes = worker_lanes(make_run(tmp_path / "demo", 12, saved=False))
    assert [(step, begin - BEGAN) for step, *_, begin in lanes["steps"]] == [(n, n) for n in range(7, 13)]
    busy = {w["name"]: w["busy"] for w in lanes["workers"]}
    assert list(busy) == ["driver", "policy-0", "rollout-0", "rollout-1"]
    assert busy["rollout-0"] == pytest.approx(0.5 / 0.95, abs=1e-3)
    [row] = lanes["workers"][0]["rows"]
    step, rollout = row[0], row[1]
    assert (lanes["names"][step[0]], step[1:4]) == ("step", [0.0, 950.0, 0])
    assert (lanes["names"][rollout[0]], rollout[1:4]) == ("rollout", [0.0, 500.0, 1])


def test_a_run_without_a_timeline_has_no_lanes_and_says_why(tmp_path):
    data = report_data(make_run(tmp_path / "demo", 2, timeline=False))
    assert data["lanes"] is None
    assert any("logs/*.spans" in text for text in data["missing"])


def test_recent_spans_are_read_from_the_end_of_the_files(tmp_path, monkeypatch):
    run = make_run(tmp_path / "demo", 400, saved=False)
    monkeypatch.setattr("launch.tools.analysis.trace.BLOCK", 2000)
    newest = recorded(run, since=BEGAN + 395)
    assert len(newest) < len(recorded(run)) / 2
    assert [s for s in newest if s.end > BEGAN + 395] == [s for s in recorded(run) if s.end > BEGAN + 395]
    assert len(assign_lanes([s for s in newest if s.worker == "driver"], fits_inside)) == 1


def test_busy_time_does_not_depend_on_the_number_of_samples(tmp_path):
    run = make_run(tmp_path / "demo", 12, saved=False)
    few = worker_lanes(run)["workers"]
    large = [["zigzag:1#0", i, 0.3, 7] for i in range(60_000)]  # more than a MiB
    line = {"span": "generate", "at": BEGAN, "s": 0.5, "samples": large}
    engine = run / "logs" / "rollout-0.spans"
    write_lines(engine, [line | {"at": BEGAN + step} for step in range(1, 13)])
    assert [(w["name"], w["busy"]) for w in worker_lanes(run)["workers"]] == [(w["name"], w["busy"]) for w in few]
    lines = engine.read_text().splitlines(keepends=True)
    engine.with_suffix(".spans.before").write_text("".join(lines[:8]))
    engine.write_text("".join(lines[8:]))
    assert [w["busy"] for w in worker_lanes(run)["workers"]] == [w["busy"] for w in few], "its file was begun anew"


def test_steps_before_a_pause_are_not_shown(tmp_path):
    run = make_run(tmp_path / "demo", 8, saved=False)
    for file in (run / "logs").glob("*.spans"):
        later = [line | {"at": line["at"] + 12 * 3600 * (line["at"] >= BEGAN + 6)} for line in read_lines(file)]
        write_lines(file, later)
    lanes = worker_lanes(run)
    assert [step for step, *_ in lanes["steps"]] == [6, 7, 8]
    assert {w["name"]: w["busy"] for w in lanes["workers"]}["rollout-0"] == pytest.approx(0.5 / 0.95, abs=1e-3)
