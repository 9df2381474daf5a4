"""Waiting for real actors that answer, raise, die, hang, or are stopped."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_worker
import pytest
from plain_worker import RecordingWatchdog

from rlsys.errors import ConfigError, StepAbandoned, WorkerFailed, WorkerLost
from rlsys.runs.stopping import StopSignal
from workers.fleet.process_registry import read_process_info
from workers.fleet.stacks import collect_stacks, innermost_calls
from workers.fleet.watchdog import LOG_TAIL_BYTES, Watchdog, log_tail

StartWorker = Callable[[str], Any]


def test_each_wait_ends_with_an_answer_or_the_root_cause(start_worker: StartWorker, tmp_path: Path) -> None:
    a, b = start_worker("a-0"), start_worker("b-0")
    watchdog = RecordingWatchdog(tmp_path, stall_s=60)
    assert watchdog.gather({"a-0": a.echo.remote(1), "b-0": b.echo.remote(2)}, "asking") == {"a-0": 1, "b-0": 2}
    with pytest.raises(WorkerFailed, match=r"asking: a-0 raised KeyError: 'x'") as failed:
        watchdog.gather({"a-0": a.fail.remote(KeyError("x"))}, "asking")
    assert not isinstance(failed.value, WorkerLost), "it would raise again"
    with pytest.raises(ConfigError, match="change this option"):
        watchdog.gather({"a-0": a.fail.remote(ConfigError("change this option"))}, "asking")
    with pytest.raises(OSError, match="No space left"):
        watchdog.gather({"a-0": a.fail.remote(OSError(28, "No space left on device", "/data/x"))}, "asking")
    # The first worker raises because the other one has died: the death is reported.
    with pytest.raises(WorkerLost, match=r"b-0 died .*\n.*b-0\.log:\n  b-0 says hello"):
        watchdog.gather({"a-0": a.fail.remote(RuntimeError("peer is gone")), "b-0": b.die.remote()}, "summing")
    assert watchdog.events == []


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "a-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: more than any memory
        file.seek(0, os.SEEK_END)
        file.write("\nthe cause\nand é\n".encode())
    assert log_tail(log).endswith("\n  the cause\n  and é")
    assert len(log_tail(log)) < LOG_TAIL_BYTES + 1000


def test_a_worker_that_does_not_come_up_says_why(ray: Any, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(plain_worker)
    actor = ray.remote(plain_worker.FailsInConstructor).options(num_cpus=0).remote("a-0", str(tmp_path))
    with pytest.raises(WorkerFailed, match="a-0 did not come up: ValueError: no such weights") as failed:
        RecordingWatchdog(tmp_path).gather({"a-0": actor.echo.remote(1)}, "starting")
    assert not isinstance(failed.value, WorkerLost)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stalled_worker_is_reported_with_its_stack(start_worker: StartWorker, tmp_path: Path, stopped: bool) -> None:
    a = start_worker("a-0")
    watchdog = RecordingWatchdog(tmp_path, stall_s=2)
    watchdog.gather({"a-0": a.echo.remote(1)}, "asking", limit_s=60)
    call = a.hang_forever.remote()
    info = read_process_info("a-0", tmp_path)
    assert info
    time.sleep(0.5)
    if stopped:
        os.kill(info.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"thinking: a-0 stalled: no answer for 2 s .*watchdog\.stall_s"):
        watchdog.gather({"a-0": call}, "thinking")
    assert time.monotonic() - began < 2 + 5
    [event] = watchdog.events
    assert (event["doing"], event["waiting_for"]) == ("thinking", ["a-0"])
    assert "hang_forever" in event["stacks"]["a-0"]
    assert any("a-0: process" in note and "hang_forever" in note for note in watchdog.notes)
    os.kill(info.pid, signal.SIGKILL)


def test_without_py_spy_a_worker_writes_its_stacks_itself(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start_worker("a-0")
    Watchdog(tmp_path).gather({"a-0": a.echo.remote(1)}, "asking")
    a.hang_forever.remote()
    time.sleep(0.5)
    monkeypatch.setattr("workers.fleet.stacks.run_py_spy", lambda pid: "")
    stacks = collect_stacks(["a-0", "z-9"], tmp_path)
    assert "hang_forever" in stacks["a-0"]
    assert "hang_forever" in innermost_calls(stacks["a-0"])
    assert "its process is not registered" in stacks["z-9"]


def test_a_run_that_is_told_to_stop_waits_no_longer_than_its_grace(start_worker: StartWorker, tmp_path: Path) -> None:
    a, stop = start_worker("a-0"), StopSignal()
    stop.step_running = True
    watchdog = RecordingWatchdog(tmp_path, stop=stop)
    stop.request(1.5)
    began = time.monotonic()
    with pytest.raises(StepAbandoned):
        watchdog.gather({"a-0": a.hang_forever.remote()}, "thinking")
    assert 1 < time.monotonic() - began < 4
