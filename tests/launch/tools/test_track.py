"""`rlsys track`: steps of a finished run for trackers that lack them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from saved import save

from launch.tools.cli import commands
from rlsys.checks import load_checked
from rlsys.config import loading
from rlsys.errors import ConfigError
from rlsys.runs.directory import read_lines

TRACKER = """
import json
from rlsys.tracking import Tracker

class ToFile(Tracker):
    def __init__(self, told, *, file, until=100):
        self.file, self.until = file, until

    def step(self, step, figures):
        if step > self.until:
            raise ConnectionError("no route")
        self.write({"step": step})

    def samples(self, step, rows):
        self.write({"rows": len(rows)})

    def end(self, how):
        self.write({"end": how})

    def write(self, line):
        with open(self.file, "a") as file:
            file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def finished(tmp_path, monkeypatch) -> Path:
    """A run of two steps, evaluated before the first; a tracker lies in `tracker.py` of the directory we are in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tracker.py").write_text(TRACKER)
    (tmp_path / "some.yaml").write_text("trainer: {steps: 2}")
    run = tmp_path / "run"
    config = load_checked(tmp_path / "some.yaml", [f"run.dir={run}"])
    run.mkdir()
    (run / "config.yaml").write_text(loading.to_yaml(config))
    lines = [{"step": 0, "eval/all/accuracy": 0.5}, {"step": 1, "kl": 0.1}, {"step": 2, "kl": 0.2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save(run / "samples" / "eval-000000.parquet", {"a:1": [1.0], "b:1": [0.0]})
    return run


def track(*words: str) -> Result:
    return CliRunner().invoke(commands, ["track", *words], catch_exceptions=False)


def test_a_new_tracker_gets_every_step(finished, tmp_path):
    result = track(str(finished), "tracking.to={tracker.py:ToFile: {file: out.jsonl}}")
    assert result.output == "tracker.py:ToFile has steps up to 2 of 2\n"
    assert read_lines(tmp_path / "out.jsonl") == [{"rows": 2}, {"step": 0}, {"step": 1}, {"step": 2}, {"end": "done"}]


def test_a_second_time_there_is_nothing_to_send(finished, tmp_path):
    track(str(finished), "tracking.to={tracker.py:ToFile: {file: out.jsonl}}")
    track(str(finished))
    assert [line["step"] for line in read_lines(tmp_path / "out.jsonl") if "step" in line] == [0, 1, 2]


def test_steps_that_could_not_be_sent_are_sent_the_next_time(finished, tmp_path):
    result = CliRunner().invoke(
        commands,
        ["track", str(finished), "tracking.to={tracker.py:ToFile: {file: out.jsonl, until: 0}}"],
        standalone_mode=False,
    )
    assert result.return_value == 1
    assert "failed after step 0: ConnectionError: no route" in result.output
    assert result.output.endswith("tracker.py:ToFile has steps up to 0 of 2\n")
    track(str(finished), "tracking.to={tracker.py:ToFile: {file: out.jsonl}}")
    assert [line["step"] for line in read_lines(tmp_path / "out.jsonl") if "step" in line] == [0, 1, 2]


def test_a_run_without_a_tracker_or_configuration_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match="names no tracker"):
        track(str(finished))
    with pytest.raises(ConfigError, match="is no run"):
        track(str(tmp_path))
