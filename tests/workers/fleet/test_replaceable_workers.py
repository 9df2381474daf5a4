"""Real actors that are lost, replaced, and brought back to the state of the others."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from plain_worker import RecordingWatchdog

from rlsys.errors import StepAbandoned, WorkerLost
from workers.fleet.replaceable_workers import ReplaceableWorkers

StartWorker = Callable[[str], Any]


@pytest.fixture
def watchdog(tmp_path: Path) -> RecordingWatchdog:
    return RecordingWatchdog(tmp_path, stall_s=60)


def test_a_lost_worker_is_replaced_and_replays_its_setup_calls(
    start_worker: StartWorker, watchdog: RecordingWatchdog, tmp_path: Path
) -> None:
    replaced: list[list[str]] = []
    workers = ReplaceableWorkers(["a-0", "a-1"], start_worker, watchdog, after_replace=replaced.append)
    workers.call("remember", "the model", doing="starting", replay=True)
    assert workers.call("echo", 7, doing="asking", only=["a-1"]) == {"a-1": 7}
    pids = workers.call("die_once", str(tmp_path / "died"), doing="working")
    assert set(pids) == {"a-0", "a-1"}
    assert len({*pids.values()}) == 2
    assert workers.call("remembered", doing="asking") == {"a-0": ["the model"], "a-1": ["the model"]}
    assert len(replaced) == 1
    assert [event["worker"] for event in watchdog.events] == replaced[0]
    assert "it is replaced" in watchdog.notes[0]


def test_before_replace_may_refuse_a_replacement(start_worker: StartWorker, watchdog: RecordingWatchdog) -> None:
    def refuse(lost: dict[str, WorkerLost]) -> None:
        raise WorkerLost(f"no replacement for {', '.join(lost)}: {lost['a-1']}")

    started: list[str] = []

    def spawn(name: str) -> Any:
        started.append(name)
        return start_worker(name)

    workers = ReplaceableWorkers(["a-0", "a-1"], spawn, watchdog, before_replace=refuse)
    with pytest.raises(WorkerLost, match="no replacement for a-1: working: a-1 died"):
        workers.call("die", doing="working", only=["a-1"])
    assert started == ["a-0", "a-1"]
    assert workers.call("echo", 7, doing="asking", only=["a-0"]) == {"a-0": 7}


def test_workers_of_concurrent_calls_are_not_replaced(
    start_worker: StartWorker, watchdog: RecordingWatchdog, tmp_path: Path
) -> None:
    workers, other = ReplaceableWorkers(["a-0"], start_worker, watchdog), start_worker("b-0")
    flag = str(tmp_path / "died")
    answers = workers.call("die_once", flag, doing="loading", concurrent_calls={"b-0": other.echo.remote(8)})
    assert answers["b-0"] == 8
    assert [event["worker"] for event in watchdog.events] == ["a-0"]
    with pytest.raises(WorkerLost, match="loading: b-0 died"):
        workers.call("hang_forever", doing="loading", concurrent_calls={"b-0": other.die.remote()})
    assert len(watchdog.events) == 1


def test_a_call_that_kills_every_replacement_fails(start_worker: StartWorker, watchdog: RecordingWatchdog) -> None:
    workers = ReplaceableWorkers(["a-0"], start_worker, watchdog)
    with pytest.raises(WorkerLost, match="working: a-0 died"):
        workers.call("die", doing="working")
    assert len(watchdog.events) == 2, "three attempts"


def test_with_one_attempt_the_first_loss_ends_the_call_and_nobody_is_replaced(
    start_worker: StartWorker, watchdog: RecordingWatchdog, tmp_path: Path
) -> None:
    workers, other = ReplaceableWorkers(["a-0", "a-1"], start_worker, watchdog), start_worker("b-0")
    workers.call("echo", 1, doing="starting")
    began, concurrent = time.monotonic(), {"b-0": other.hang_forever.remote()}
    with pytest.raises(WorkerLost, match=r"loading: a-\d died"):
        workers.call("die_once", str(tmp_path / "died"), doing="loading", concurrent_calls=concurrent, max_attempts=1)
    assert time.monotonic() - began < 20
    assert not watchdog.events


def test_nobody_is_replaced_when_the_run_is_over(
    ray: Any, start_worker: StartWorker, watchdog: RecordingWatchdog
) -> None:
    """The run's end kills its workers, and a thread of the driver may still wait for one."""
    workers = ReplaceableWorkers(["a-0"], start_worker, watchdog)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(workers.call, "hang_forever", doing="scoring")
        time.sleep(1)
        watchdog.stop.end_now()
        ray.kill(workers.actors["a-0"])
        with pytest.raises(StepAbandoned):
            call.result(timeout=10)
    workers = ReplaceableWorkers(["a-1"], start_worker, watchdog)
    with pytest.raises(StepAbandoned):
        workers.replace({"a-1": WorkerLost("it died")}, dict(workers.actors))
    watchdog.stop.mark_lost("Ray's raylet has ended")
    with pytest.raises(WorkerLost, match="raylet"):
        workers.replace({"a-1": WorkerLost("it died")}, dict(workers.actors))
    assert not watchdog.events
    assert not watchdog.notes
