"""`make quick` and `make test`, with a program in the place of pytest, and who calls them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FAST_HALF = ["tests/launch", "tests/rlsys"]
PYTEST = """#!/bin/sh
echo "$@" >> {folder}/words
env > {folder}/environment-of-$(wc -l < {folder}/words)
case "$*" in *{failing}*) exit 3 ;; esac
"""


def make(target: str, folder: Path, failing: str = "nothing") -> "subprocess.CompletedProcess[str]":
    """Nothing is installed: its stamp is there."""
    program, stamp = folder / "pytest", folder / "stamp"
    program.write_text(PYTEST.format(folder=folder, failing=failing))
    program.chmod(0o755)
    stamp.touch()
    command = ["make", "-o", str(stamp), target, f"BIN={folder}", f"STAMP={stamp}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


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
