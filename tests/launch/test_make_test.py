"""`make quick`, `make test` and `make long`, with a program in the place of pytest, and who calls them."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FAST_HALF = ["tests/launch", "tests/rlsys"]
PYTEST = """#!/bin/sh
echo "$@" >> {folder}/words
env > {folder}/environment-of-$(wc -l < {folder}/words)
case "$*" in *--last-failed*) exit {again} ;; *{failing}*) exit {code} ;; esac
"""


def make(
    target: str, folder: Path, failing: str = "nothing", code: int = 1, again: int = 0, options: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    """Nothing is installed: its stamp is there. Pytest ends with `code` in the failing part, with `again` if that is run again."""
    program, stamp = folder / "pytest", folder / "stamp"
    program.write_text(PYTEST.format(folder=folder, failing=failing, code=code, again=again))
    program.chmod(0o755)
    stamp.touch()
    command = ["make", "-o", str(stamp), target, f"BIN={folder}", f"STAMP={stamp}", *options]
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # nothing of a make around it
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)


def parts(folder: Path) -> list[list[str]]:
    """The folders of each call of pytest."""
    calls = (folder / "words").read_text().splitlines()
    return [[word for word in line.split() if word.startswith("tests/")] for line in calls]


@pytest.mark.parametrize(
    ("failing", "exit_code"), [("tests/launch", 2), ("tests/workers", 2), ("tests/system", 2), ("nothing", 0)]
)
def test_a_part_that_fails_keeps_no_other_from_running_and_is_not_forgotten(
    tmp_path: Path, failing: str, exit_code: int
) -> None:
    done = make("test", tmp_path, failing)
    assert done.returncode == exit_code, done.stdout + done.stderr  # make's own for any failure is 2
    assert parts(tmp_path) == [FAST_HALF, ["tests/workers"], ["tests/storms", "tests/system"]]


def test_the_long_tests_are_those_that_the_others_leave_out(tmp_path: Path) -> None:
    make("test", tmp_path)
    make("long", tmp_path)
    calls = (tmp_path / "words").read_text().splitlines()
    assert [re.findall(r"-m (not long|long) tests/(.*)", call) for call in calls] == [
        [("not long", "launch tests/rlsys")],
        [("not long", "workers")],
        [("not long", "storms tests/system")],
        [("long", "launch tests/rlsys tests/workers")],
        [("long", "system")],
    ]


@pytest.mark.parametrize(
    ("code", "again", "options", "exit_code", "calls"),
    [
        (1, 0, ["AGAIN=1"], 0, 4),  # a test failed, and passed when it was run again
        (1, 1, ["AGAIN=1"], 2, 4),  # it failed twice
        (1, 5, ["AGAIN=1"], 2, 4),  # pytest knows of none that failed
        (3, 0, ["AGAIN=1"], 2, 3),  # pytest itself failed
        (1, 0, [], 2, 3),
    ],
)
def test_failed_tests_are_run_again_where_that_is_asked_for(
    tmp_path: Path, code: int, again: int, options: list[str], exit_code: int, calls: int
) -> None:
    done = make("test", tmp_path, "tests/workers", code, again, options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    lines = (tmp_path / "words").read_text().splitlines()
    assert len(lines) == calls
    if calls == 4:
        assert lines[2].split() == [
            *lines[1].split(),
            "-n",
            "0",
            *["--last-failed", "--last-failed-no-failures", "none"],
        ]


def test_no_two_test_modules_have_one_name() -> None:
    """Pytest imports them by name, and a target may run those of several folders."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_automatic_check_runs_failed_tests_again_and_the_nightly_one_the_long_ones() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test AGAIN=1"
    [targets] = re.findall(r"target: \[(.*)\]", (ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    assert {"test", "long"} <= set(targets.split(", "))


def test_ray_does_not_start_where_the_fast_half_runs(tmp_path: Path) -> None:
    make("quick", tmp_path)
    make("test", tmp_path)
    assert parts(tmp_path)[:2] == [FAST_HALF, FAST_HALF]
    alone, within = (environment(tmp_path / f"environment-of-{call}") for call in (1, 2))
    assert alone == within
    ray = Path(sys.executable).with_name("ray")
    for start in ([sys.executable, "-c", "import ray; ray.init('local')"], [ray, "start", "--head", "--port=0"]):
        done = subprocess.run(start, env=alone, capture_output=True, text=True, timeout=60)
        assert done.returncode
        assert "If 'use_gdb' is true, then 'use_tmux' must be true as well." in done.stderr


def environment(file: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    return {name: value for name, value in pairs if name in os.environ or name.startswith("RAY")} | {"SHLVL": "1"}


def test_what_is_run_on_each_push_are_targets_of_make() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        [job] = yaml.safe_load(file.read_text())["jobs"].values()
        words = [step["run"].split(maxsplit=1) for step in job["steps"] if "run" in step]
        assert {program for program, _ in words} == {"make"}, file
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
        called[file.stem] = matrix or [target for _, target in words]
    assert called.keys() == {"push", "main", "nightly"}
    assert called["push"] == ["lint", "quick"]
    assert called["main"] == ["test"]
    assert {target for several in called.values() for target in several} <= set(targets)
