"""`make test`, with a program in the place of pytest."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTEST = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *{failing}*) exit 3 ;; esac
"""


@pytest.mark.parametrize(
    ("failing", "exit_code"), [("tests/launch", 2), ("tests/workers", 2), ("tests/system", 2), ("nothing", 0)]
)
def test_a_part_that_fails_keeps_no_other_from_running_and_is_not_forgotten(
    tmp_path: Path, failing: str, exit_code: int
) -> None:
    program, log = tmp_path / "pytest", tmp_path / "log.txt"
    program.write_text(PYTEST.format(log=log, failing=failing))
    program.chmod(0o755)
    stamp = f"STAMP={tmp_path}/stamp"  # nothing is installed
    (tmp_path / "stamp").touch()
    done = subprocess.run(
        ["make", "-o", f"{tmp_path}/stamp", "test", f"BIN={tmp_path}", stamp], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == exit_code, done.stdout + done.stderr  # make's own for any failure is 2
    parts = [[word for word in line.split() if word.startswith("tests/")] for line in log.read_text().splitlines()]
    assert parts == [["tests/launch", "tests/rlsys"], ["tests/workers"], ["tests/system"]]
