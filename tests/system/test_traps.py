"""A reward function that hangs, crashes, lies and leaves threads behind: the run learns, and says what failed and why."""

import pytest
from looking import Seen

pytestmark = pytest.mark.long

REASONS = ("timeout", "crash", "memory", "exception", "invalid")


def test_a_run_learns_whatever_its_reward_function_does(trapped: Seen) -> None:
    lines = trapped.run.lines()
    assert lines[-1]["step"] == 9
    assert lines[-1]["eval/zigzag/accuracy"] > lines[0]["eval/zigzag/accuracy"] + 0.1
    failed = {reason: sum(line.get(f"failure/{reason}", 0) for line in lines) for reason in REASONS}
    assert all(failed.values()), failed
    assert sum(failed.values()) == sum(line.get("reward/failed", 0) for line in lines)
    failures = trapped.run.events("reward failure")
    assert {e["reason"] for e in failures} == set(REASONS)
    assert any("Traceback" in e["detail"] for e in failures)
    assert "a reward verdict failed (timeout): no verdict after 1 s" in trapped.run.text()
