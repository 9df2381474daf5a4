"""What `tests/bench/driver.py` measures is a whole run of the real trainer; here it is a small one."""

import re
import subprocess
import sys

import pytest
from killing import ROOT

pytestmark = pytest.mark.long


def test_the_drivers_own_time_is_measured_by_sample_length():
    command = [sys.executable, "tests/bench/driver.py", "--tokens", "8", "64", "--steps", "2", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) to (\d+)", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [8, 64], done.stdout
    for _, median, least, most in rows:
        assert 0 < int(least) <= int(median) <= int(most) < 5_000, done.stdout
