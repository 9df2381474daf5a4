"""Processes that are forked are as if Python had been started for each."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.config.plugins import PROCESS_MARK
from workers.processes.forkserver import FORKSERVER
from workers.processes.handle import ProcessHandle


@dataclass(frozen=True)
class FactSettings:
    description: str = ""
    memory_mb: int = 0


@pytest.fixture
def handles() -> Iterator[list[ProcessHandle]]:
    started: list[ProcessHandle] = []
    yield started
    for handle in started:
        handle.kill()


def start(handles: list[ProcessHandle], description: str = "") -> ProcessHandle:
    handles.append(ProcessHandle("forked_facts", FactSettings(description)))
    return handles[-1]


def facts(handle: ProcessHandle) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (messages := handle.read_messages()):
        assert not handle.closed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return messages[0]


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def require_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 10  # a killed process takes the kernel a moment
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_a_process_has_the_environment_folder_and_path_of_the_moment(
    handles: list[ProcessHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = facts(start(handles))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATER", "set after the forkserver's start")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    second = facts(start(handles))
    assert "LATER" not in first["environment"]
    assert second["environment"]["LATER"] == "set after the forkserver's start"
    assert second["environment"]["PYTHONPATH"].split(os.pathsep) == [p for p in sys.path if p]
    assert second["path"][:2] == [str(tmp_path), str(tmp_path / "modules")]
    assert (first["folder"], second["folder"]) == (str(Path(__file__).parents[3]), str(tmp_path))
    assert first["stdin"] == second["stdin"] == ""
    assert [first[fact] for fact in ("preloaded", "session", "parent")] == [True] * 3


def test_processes_draw_different_numbers_and_hash_equally(handles: list[ProcessHandle]) -> None:
    one, other = facts(start(handles)), facts(start(handles))
    assert one["random"][0] != other["random"][0]
    assert one["random"][1] != other["random"][1]
    assert one["hash"] == other["hash"]


def test_a_kill_ends_all_that_a_process_started_and_no_other(handles: list[ProcessHandle]) -> None:
    one, other = start(handles), start(handles)
    mine, others = facts(one), facts(other)
    shown = psutil.Process(mine["pids"][0])
    assert shown.cmdline()[:3] == [sys.executable, "-m", "forked_facts"]
    assert shown.environ()[PROCESS_MARK] == mine["environment"][PROCESS_MARK] == one.mark
    assert one.kill() == "killed by SIGKILL"
    require_ended(mine["pids"])
    assert all(map(runs, others["pids"]))
    assert one.kill() == "killed by SIGKILL"  # a second time harms nobody


def test_a_process_that_exits_tells_its_code(handles: list[ProcessHandle]) -> None:
    handle = start(handles)
    facts(handle)
    handle.send("go on")
    while not handle.closed:
        handle.read_messages()
    assert handle.kill() == "exit code 7"


def test_a_library_that_cannot_be_imported_does_not_end_the_forkserver(handles: list[ProcessHandle]) -> None:
    server = FORKSERVER.process.pid
    assert facts(start(handles, "broken"))["session"]
    assert FORKSERVER.process.pid == server


def test_processes_end_with_a_killed_forkserver_which_is_replaced(handles: list[ProcessHandle]) -> None:
    lost = start(handles)
    processes = facts(lost)["pids"]
    FORKSERVER.process.kill()
    while not lost.closed:
        lost.read_messages()
    assert lost.kill() == "killed by SIGKILL"
    require_ended(processes)
    assert facts(start(handles))["parent"]
