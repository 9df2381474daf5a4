"""Trackers follow a run, and whatever they do, it is the same run."""

import json
import sys
import time
from pathlib import Path

import pytest
from machines import Machines, killed_while, learned

from rlsys.config.schema import TrackerConfig
from rlsys.config.shorthand import parse_entries, shorten_entries
from rlsys.errors import ConfigError
from rlsys.runs.directory import read_lines
from rlsys.tracking import follower
from rlsys.tracking.builtin import missing_libraries
from rlsys.tracking.follower import Follower, LineReader
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo, Tracker
from rlsys.tracking.tracking import Tracking

OWN = Path(__file__).with_name("own_tracker.py")


def tracked(folder, tracker: str = "LoggingTracker", *overrides: str, **options) -> Machines:
    """A run of three steps, evaluated after steps 0, 2 and 3, with a tracker that writes `calls.jsonl`."""
    options = {"tracker": f"{OWN}:{tracker}", "file": str(folder / "calls.jsonl")} | options
    return Machines(folder, f"tracking.to={{mine: {json.dumps(options)}}}", *overrides)


def logged(folder, key: str = "step") -> list:
    return [line[key] for line in read_lines(folder / "calls.jsonl") if key in line]


def events(machines: Machines, kind: str) -> list[dict]:
    return [e for e in read_lines(machines.run_directory.path / "events.jsonl") if e["event"] == kind]


@pytest.fixture
def hasty(monkeypatch):
    """Short pauses."""
    monkeypatch.setattr(follower, "POLL_S", 0.01)
    monkeypatch.setattr(follower, "RETRY_S", (0.05, 0.1))


@pytest.fixture
def mortal(monkeypatch):
    """The threads of a killed driver end with it, and no tracker is finished."""
    ended = Tracking.__exit__

    def die():
        raise ConfigError("killed")

    def left(tracking, kind, *rest):
        if kind is None or kind.__name__ != "Killed":
            return ended(tracking, kind, *rest)
        tracking.ended.set()
        for thread in tracking.followers:
            thread.events.read_new, thread.report_failure = die, lambda *_: None
            thread.run_ended.set()
            thread.join()

    monkeypatch.setattr(Tracking, "__exit__", left)


# --- what a tracker gets ------------------------------------------------------------------------------------------------


def test_a_tracker_gets_every_line_some_samples_of_evaluations_and_the_end(tmp_path):
    machines = tracked(tmp_path, "LoggingTracker", "tracking.samples=2").run()
    lines = machines.lines
    assert logged(tmp_path) == [0, 1, 2, 3]
    assert [{"step": s} | f for s, f in zip(logged(tmp_path), logged(tmp_path, "metrics"), strict=True)] == lines
    assert logged(tmp_path, "samples") == [0, 2, 3]
    first = logged(tmp_path, "rows")[0]
    assert [row["uid"] for row in first] == machines.column("eval-000000", "uid")[:2]
    assert set(first[0]) == {"uid", "prompt", "completion", "reward"}
    assert logged(tmp_path, "end") == ["done"]
    assert {"sync", "checkpoint"} <= set(logged(tmp_path, "event"))


def test_it_gets_the_run_once_with_all_options(tmp_path):
    machines = tracked(tmp_path).run()
    (begin,) = [line for line in read_lines(tmp_path / "calls.jsonl") if "begin" in line]
    assert begin["begin"].startswith("run-")
    assert (begin["name"], begin["first"], begin["started"]) == ("run", 0, False)
    assert begin["config"]["policy.lr"] == 0.125
    assert begin["config"]["run.dir"] == machines.config.run.dir


def test_a_secret_in_the_environment_is_not_among_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "Zq9-correct-horse")
    functions = f"reward.functions={{{OWN}:LoggingTracker: {{key: '${{oc.env:MY_SECRET}}'}}}}"
    tracked(tmp_path, "LoggingTracker", functions).run()
    assert "Zq9" not in (tmp_path / "calls.jsonl").read_text()
    assert "${oc.env:MY_SECRET}" in json.dumps(logged(tmp_path, "config"))


def test_a_secret_reaches_a_trackers_own_option(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_FILE", str(tmp_path / "calls.jsonl"))
    machines = tracked(tmp_path, file="${oc.env:MY_FILE}").run()
    assert logged(tmp_path) == [0, 1, 2, 3]
    assert "${oc.env:MY_FILE}" in (machines.run_directory.path / "config.yaml").read_text()


def test_without_samples_none_are_read(tmp_path):
    tracked(tmp_path, "LoggingTracker", "tracking.samples=0").run()
    assert logged(tmp_path, "samples") == []


# --- trackers that fail ----------------------------------------------------------------------------------------------------


def test_a_tracker_that_raises_is_tried_again_and_misses_nothing(tmp_path, hasty, monkeypatch):
    monkeypatch.setenv("SERVICE", "https://me:pass-word-7@host")
    machines = tracked(tmp_path, "RaisingTracker").run()
    assert sorted(logged(tmp_path)) == [0, 1, 2, 3]
    (failed,) = events(machines, "tracker failed")
    assert failed["tracker"] == "mine"
    assert "ConnectionError" in failed["trace"]
    notes = [note for note in machines.progress.notes if note.startswith("tracking:")]
    assert notes[0].startswith("tracking: mine failed after step 0: ConnectionError: no route")
    assert "The run goes on." in notes[0]
    assert notes[1] == "tracking: mine goes on, with step 1"
    assert "pass-word-7" not in json.dumps([machines.progress.notes, failed])


def test_a_tracker_that_always_raises_changes_nothing_of_the_run(tmp_path, hasty):
    (tmp_path / "without").mkdir()
    without = Machines(tmp_path / "without").run()
    machines = tracked(tmp_path, "BrokenTracker").run()
    assert learned(machines.lines) == learned(without.lines)
    notes = [note for note in machines.progress.notes if note.startswith("tracking:")]
    assert len(notes) == 2, "the first failure, and what it lacks at the end"
    assert notes[1] == f"tracking: mine has steps up to -1; `rlsys track {machines.run_directory.path}` sends the rest"


def test_a_tracker_that_has_failed_for_a_week_is_still_followed(tmp_path):
    def down(run_info):
        raise ConnectionError("no route")

    run_info, notes, failures = RunInfo("run-1", "run", tmp_path, {}, first_step=0, resumed=False), [], []
    memory = SentSteps(tmp_path)
    thread = Follower(
        "mine", down, run_info, 0, 0, memory, notes.append, lambda kind, **fields: failures.append(fields)
    )
    thread.failures = 1024
    thread.run_ended.set()
    thread.run()
    assert failures[0]["error"] == "ConnectionError: no route"
    assert notes == [f"mine has steps up to -1; `rlsys track {tmp_path}` sends the rest"]


def test_a_tracker_that_cannot_start_does_not_hold_the_run(tmp_path, hasty):
    machines = tracked(tmp_path, "not_there").run()
    assert [line["step"] for line in machines.lines] == [0, 1, 2, 3]
    assert "mine failed at its start: OSError: no such service" in "\n".join(machines.progress.notes)


def test_a_hanging_tracker_is_reported_and_not_waited_for_too_long(tmp_path, hasty, monkeypatch):
    from rlsys.tracking import tracking

    monkeypatch.setattr(tracking, "HANGS_S", 0.2)
    monkeypatch.setattr(tracking, "END_S", 1.0)
    machines = tracked(tmp_path, "HangingTracker")
    began = time.monotonic()
    machines.run()
    assert time.monotonic() - began < 5
    assert [line["step"] for line in machines.lines] == [0, 1, 2, 3]
    assert "mine has steps up to 0, and was not done within 1 s." in "\n".join(machines.progress.notes)
    sys.modules["rlsys_user_own_tracker"].FREE.set()


def test_a_long_call_is_reported_once(tmp_path, hasty, monkeypatch):
    from rlsys.tracking import tracking

    monkeypatch.setattr(tracking, "HANGS_S", 0.2)
    machines = tracked(tmp_path, "SlowTracker").run()
    notes = [note for note in machines.progress.notes if "has not answered" in note]
    assert len(notes) <= 1
    assert logged(tmp_path) == [0, 1, 2, 3]


def test_what_is_not_a_tracker_is_reported_and_left_out(tmp_path):
    machines = tracked(tmp_path, "no_tracker").run()
    assert "tracking.to.mine gave a str; it must give a Tracker" in "\n".join(machines.progress.notes)


def test_a_tracker_without_the_method_step_is_told_to_have_one():
    class Silent(Tracker):
        pass

    with pytest.raises(NotImplementedError, match=r"^Silent must have a method `step\(step, metrics\)`\.$"):
        Silent().step(1, {})


# --- going on --------------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_the_same_run_to_its_tracker(tmp_path):
    tracked(tmp_path).run()
    tracked(tmp_path, "LoggingTracker", "trainer.steps=5").run()
    ids = logged(tmp_path, "begin")
    assert ids[0] == ids[1]
    assert logged(tmp_path, "first") == [0, 4]
    assert logged(tmp_path, "started") == [False, True]
    assert logged(tmp_path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("overwrites", "steps"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2, 3, 3])])
def test_steps_that_are_done_again_are_kept_or_overwritten(tmp_path, hasty, overwrites, steps):
    """Killed in step 4, it goes on from the checkpoint of step 2."""
    first = tracked(tmp_path, "LoggingTracker", "trainer.steps=5", "eval.every=5", overwrites=overwrites)
    real = first.policy.update

    def update(*arguments):
        if len(first.policy.updates) == 6:  # two a step
            while logged(tmp_path)[-1:] != [3]:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return real(*arguments)

    first.policy.update = update
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = tracked(tmp_path, "LoggingTracker", "trainer.steps=5", "eval.every=5", overwrites=overwrites).run()
    assert logged(tmp_path) == [*steps, 4, 5]
    assert logged(tmp_path, "first") == [0, 3]
    assert logged(tmp_path, "end") == ["stopped", "done"]
    noted = "tracking: mine keeps what it has of steps 3 to 3, which are done again" in again.progress.notes
    assert noted is not overwrites


def test_a_tracker_that_is_named_later_gets_what_was_before(tmp_path):
    Machines(tmp_path).run()
    tracked(tmp_path, "LoggingTracker", "trainer.steps=4").run()
    assert logged(tmp_path) == [0, 1, 2, 3, 4]


def test_a_killed_run_tells_each_step_once(tmp_path, hasty, mortal):
    killed_while(tracked(tmp_path, "LoggingTracker", "trainer.steps=5"), "update", 5)
    assert logged(tmp_path, "end") == []
    tracked(tmp_path, "LoggingTracker", "trainer.steps=5").run()
    assert logged(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert logged(tmp_path, "end") == ["done"]


# --- files that grow -------------------------------------------------------------------------------------------------------


def test_a_line_is_read_when_it_is_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = LineReader(file)
    assert lines.read_new() == []
    file.write_text('{"step": 0}\n{"st')
    assert lines.read_new() == [{"step": 0}]
    assert lines.read_new() == []
    with file.open("a") as more:
        more.write('ep": 1}\n')
    assert lines.read_new() == [{"step": 1}]


def test_a_line_that_was_cut_off_for_good_is_left_out(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text('{"event": "st\n{"event": "resume"}\n')
    assert LineReader(file).read_new() == [{"event": "resume"}]


# --- the configuration -----------------------------------------------------------------------------------------------------


def test_trackers_may_be_a_name_a_list_or_a_mapping():
    one = {"wandb": TrackerConfig("wandb")}
    assert (
        parse_entries("tracking.to", "wandb")
        == parse_entries("tracking.to", ["wandb"])
        == parse_entries("tracking.to", {"wandb": None})
        == one
    )
    entries = parse_entries(
        "tracking.to", {"wandb": {"project": "sums"}, "ours": {"tracker": "mlflow", "uri": "http://a"}}
    )
    assert entries == {
        "wandb": TrackerConfig("wandb", {"project": "sums"}),
        "ours": TrackerConfig("mlflow", {"uri": "http://a"}),
    }
    assert shorten_entries(entries) == {"wandb": {"project": "sums"}, "ours": {"tracker": "mlflow", "uri": "http://a"}}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("[tensorbord]", "tracking.to is `tensorbord`; known: tensorboard, wandb, mlflow, or module:function."),
        ("{wandb: {projct: a}}", "tracking.to.wandb has no option `projct`. Did you mean `project`?"),
        ("[gone.py:mine]", "tracking.to: the file gone.py (of `gone.py:mine`) does not exist"),
        ("{wandb: 3}", "`tracking.to.wandb` must be a mapping of settings; it is 3."),
        ("{mlflow: {uri: 'http://me:pass-word-7@host'}}", "tracking.to.mlflow.uri holds a password in an address"),
        ("{mlflow: {uri: '${oc.env:NOT_SET_HERE}'}}", "the environment variable NOT_SET_HERE is not set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(refused, value, sentence):
    assert any(sentence in problem for problem in refused("", f"tracking.to={value}"))


def test_a_missing_library_is_named_with_the_command_that_installs_it(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (sentence,) = missing_libraries(read("", "tracking.to=wandb").tracking)
    assert sentence.startswith("tracking.to: wandb is not installed. `pip install")


def test_a_trackers_own_function_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no function `Gone`"):
        tracked(tmp_path, "Gone")
