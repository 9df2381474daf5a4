"""Tasks of verifiers as a data set, against the real package."""

import json

import pytest

from rlsys.config.schema import DataSource
from rlsys.config.shorthand import parse_entries, shorten_entries
from rlsys.data.origin import Origin, locate_data
from rlsys.data.readers import read_rows
from rlsys.errors import ConfigError
from rlsys.tasks import taskset

pytest.importorskip("verifiers.v1")

ENDLESS = """
import itertools
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass

class Config(vf.TasksetConfig):
    start: int = 0

class Numbers(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        for i in itertools.count(self.config.start):
            yield Task(Data(prompt=f"Double {i}.", number=i), self.config.task)

__all__ = ["Numbers"]
"""


@pytest.fixture(autouse=True)
def numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rlsys_test_numbers.py").write_text(ENDLESS)


def read(**options):
    origin = Origin("verifiers:rlsys_test_numbers", options=json.dumps(options))
    return [row.fields for row in read_rows(origin, locate_data(origin))]


def test_rows_hold_the_tasks_of_the_package():
    rows = read(size=3, start=5)
    assert [row["prompt"] for row in rows] == ["Double 5.", "Double 6.", "Double 7."]
    assert {row["source"] for row in rows} == {"rlsys_test_numbers"}
    assert [json.loads(row["verifiers"][2])["number"] for row in rows] == [5, 6, 7]
    assert len(read()) == 1000, "of endless ones too"


def test_the_set_brings_its_episode():
    entries = parse_entries("data.train", {"verifiers:rlsys_test_numbers": {"start": 2, "weight": 3}})
    [source] = entries.values()
    spec = "verifiers:rlsys_test_numbers"
    assert source == DataSource(path=spec, weight=3.0, episode=spec, options={"start": 2})
    assert parse_entries("data.train", shorten_entries(entries)) == entries
    [other] = parse_entries("data.train", {spec: {"episode": "my_game.py:play"}}).values()
    assert other.episode == "my_game.py:play"


def test_tasks_that_cannot_be_loaded_are_refused_by_name(tmp_path):
    broken = ENDLESS.replace("for i in", "open('/absent')\n        for i in")
    (tmp_path / "rlsys_test_broken.py").write_text(broken)
    with pytest.raises(ConfigError, match=r"verifiers:rlsys_test_broken: loading its tasks raised FileNotFoundError: "):
        taskset.rows("rlsys_test_broken", {})


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("absent_numbers", {}, ["verifiers:absent_numbers", "not found"]),
        ("rlsys_test_numbers", {"begin": 2}, ["verifiers:rlsys_test_numbers", "begin"]),
        ("rlsys_test_numbers", {"start": "x"}, ["start"]),
        ("rlsys_test_numbers", {"size": 0}, ["size is 0"]),
    ],
)
def test_what_cannot_be_made_is_refused(name, options, parts):
    with pytest.raises(ConfigError) as error:
        taskset.check(name, options)
    [problem] = error.value.problems
    assert all(part in problem for part in parts), problem
