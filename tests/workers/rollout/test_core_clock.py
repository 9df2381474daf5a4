"""tests/gpu/decoding.py compares blocks with single tokens in one engine, by the names of its requests."""

import sys
from pathlib import Path

import pytest
from core_scheduler import Core, make_request, make_scheduler

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))
import core_clock


def test_single_requests_are_read_token_by_token_and_others_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core_clock, "clock_executors", lambda: None)
    monkeypatch.setattr(core_clock, "subclasses", lambda kind: [])
    monkeypatch.setattr(core_clock, "SINGLE", "9")  # the names of these requests are numbers
    scheduler = make_scheduler(tmp_path, core_clock.build_clocked)
    core = Core(scheduler)

    def messages(names: list[str]) -> int:
        for name in names:
            scheduler.add_request(make_request(name, [3] * 20, 32))
        count = 0
        while scheduler.has_requests() or core.running:
            count += sum(bool(message.outputs) for message in core.step()[1].values())
        return count

    assert [messages(names) for names in (["1", "2"], ["91", "92"], ["3"])] == [2, 32, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if "core, ms a step" in line]
    assert len(lines) == 3
    assert all("schedule" in line and "update_from_output" in line for line in lines)
