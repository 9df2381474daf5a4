"""The judgement on memory, for processes whose growth is known."""

from typing import Any

import pytest
from process_memory import Life, ProcessMemory

pytestmark = pytest.mark.long


def life(role: str, steps: int, growth: float, *, begins: int = 0) -> Life:
    """A process that takes 60 MiB in its first 200 steps, then `growth` MiB in 100 steps, and ±2 MiB now and then."""
    points = []
    for i in range(0, steps + 1, 5):
        size = 400 + 0.3 * min(i, 200) + growth * max(i - 200, 0) / 100 + 2 * (-1) ** (i // 50)
        points.append((begins + i, size, size - 100))
    return Life(role, points)


def report(*lives: Life) -> dict[str, Any]:
    memory = ProcessMemory()
    memory.lives = {(pid, 0.0): life for pid, life in enumerate(lives)}
    return memory.report()


def test_a_process_that_grows_after_its_first_steps_is_named() -> None:
    judged = report(life("driver", 2000, 0.0), life("gcs_server", 2000, 1.2), life("policy-0", 2000, 0.8))
    assert judged["growing"] == ["gcs_server"]
    rows = judged["growth_mib_per_100_steps"]
    assert [row["role"] for row in rows] == ["gcs_server", "policy-0", "driver"]
    assert [row["growth"] for row in rows] == pytest.approx([1.2, 0.8, 0.0], abs=0.05)
    assert [row["private_growth"] for row in rows] == pytest.approx([1.2, 0.8, 0.0], abs=0.05)


def test_steps_count_from_the_start_of_the_process() -> None:
    judged = report(life("policy-0", 700, 3.0, begins=1000))
    assert judged["growing"] == ["policy-0"]
    assert judged["growth_mib_per_100_steps"][0]["steps"] == [1200, 1700]


def test_processes_that_live_too_short_are_counted_and_not_judged() -> None:
    judged = report(life("policy-0", 695, 9.0), life("policy-0", 40, 9.0), life("reward-0", 100, 0.0))
    assert judged["growing"] == judged["growth_mib_per_100_steps"] == []
    assert judged["shorter_than_700_steps"] == {
        "policy-0": {"processes": 2, "longest": 695},
        "reward-0": {"processes": 1, "longest": 100},
    }
