"""Waiting for real actors that answer, raise, die, hang, or are stopped."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema import ConfigError
from rlsys.runs.errors import StepAbandoned, WorkerFailed, WorkerLost
from rlsys.runs.stopping import StopSignal
from workers.supervision.process_registry import read_process_info
from workers.supervision.replaceable_workers import ReplaceableWorkers
from workers.supervision.stacks import collect_stacks, innermost_calls
from workers.supervision.watchdog import Watchdog
from workers.supervision.worker_setup import setup_worker_process


class Someone:
    def __init__(self, name: str, logs: str):
        setup_worker_process(name, logs)
        self.told: list[str] = []
        print(f"{name} says hello", flush=True)

    def answer(self, value: Any) -> Any:
        return value

    def remember(self, what: str) -> str:
        self.told.append(what)
        return what

    def memory(self) -> list[str]:
        return self.told

    def fail(self, error: Exception) -> None:
        raise error

    def die(self) -> None:
        os._exit(3)

    def die_once(self, flag: str) -> int:
        if not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(3)
        return os.getpid()

    def think_about_it(self) -> None:
        time.sleep(1000)


@pytest.fixture
def start(ray: Any, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    actors = []
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

    def spawn(name: str) -> Any:
        actors.append(ray.remote(Someone).options(num_cpus=0).remote(name, str(tmp_path)))
        return actors[-1]

    yield spawn
    for actor in actors:
        ray.kill(actor)


class Unfinished(Someone):
    def __init__(self, name: str, logs: str):
        raise ValueError("no such weights")


class Told(Watchdog):
    def __init__(self, logs: Path, **settings: Any):
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []
        super().__init__(
            logs, note=self.notes.append, event=lambda kind, **facts: self.events.append(facts), **settings
        )


def test_each_wait_ends_with_an_answer_or_the_root_cause(start: Callable[[str], Any], tmp_path: Path) -> None:
    a, b = start("a-0"), start("b-0")
    watch = Told(tmp_path, stall_s=60)
    assert watch.gather({"a-0": a.answer.remote(1), "b-0": b.answer.remote(2)}, "asking") == {"a-0": 1, "b-0": 2}
    with pytest.raises(WorkerFailed, match=r"asking: a-0 raised KeyError: 'x'") as failed:
        watch.gather({"a-0": a.fail.remote(KeyError("x"))}, "asking")
    assert not isinstance(failed.value, WorkerLost), "it would raise again"
    with pytest.raises(ConfigError, match="mend it"):
        watch.gather({"a-0": a.fail.remote(ConfigError("mend it"))}, "asking")
    with pytest.raises(OSError, match="No space left"):
        watch.gather({"a-0": a.fail.remote(OSError(28, "No space left on device", "/data/x"))}, "asking")
    # Who raised first did so because the other one died: that is what is told.
    with pytest.raises(WorkerLost, match=r"b-0 died .*\n.*b-0\.log:\n  b-0 says hello"):
        watch.gather({"a-0": a.fail.remote(RuntimeError("peer is gone")), "b-0": b.die.remote()}, "summing")
    assert watch.events == []


def test_a_worker_that_does_not_come_up_says_why(ray: Any, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(Unfinished).options(num_cpus=0).remote("a-0", str(tmp_path))
    with pytest.raises(WorkerFailed, match="a-0 did not come up: ValueError: no such weights") as failed:
        Told(tmp_path).gather({"a-0": actor.answer.remote(1)}, "starting")
    assert not isinstance(failed.value, WorkerLost)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_that_says_nothing_is_found_with_its_stack(
    start: Callable[[str], Any], tmp_path: Path, stopped: bool
) -> None:
    a = start("a-0")
    watch = Told(tmp_path, stall_s=2)
    watch.gather({"a-0": a.answer.remote(1)}, "asking", limit_s=60)
    call = a.think_about_it.remote()
    place = read_process_info("a-0", tmp_path)
    assert place
    time.sleep(0.5)
    if stopped:
        os.kill(place.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"thinking: nothing heard from a-0 for 2 s .*watchdog\.stall_s"):
        watch.gather({"a-0": call}, "thinking")
    assert time.monotonic() - began < 2 + 5
    [event] = watch.events
    assert (event["doing"], event["waiting_for"]) == ("thinking", ["a-0"])
    assert "think_about_it" in event["stacks"]["a-0"]
    assert any("a-0 is at  process" in note and "think_about_it" in note for note in watch.notes)
    os.kill(place.pid, signal.SIGKILL)


def test_without_py_spy_the_process_writes_its_stacks_itself(
    start: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start("a-0")
    Watchdog(tmp_path).gather({"a-0": a.answer.remote(1)}, "asking")
    a.think_about_it.remote()
    time.sleep(0.5)
    monkeypatch.setattr("workers.supervision.stacks.run_py_spy", lambda pid: "")
    found = collect_stacks(["a-0", "z-9"], tmp_path)
    assert "think_about_it" in found["a-0"]
    assert "think_about_it" in innermost_calls(found["a-0"])
    assert "it has not said where it is" in found["z-9"]


def test_a_stalled_worker_ends_the_run_where_that_is_wanted(start: Callable[[str], Any], tmp_path: Path) -> None:
    a = start("a-0")
    watch = Told(tmp_path, stall_s=1, abort=True)
    with pytest.raises(WorkerFailed) as failed:
        watch.gather({"a-0": a.think_about_it.remote()}, "thinking")
    assert not isinstance(failed.value, WorkerLost)


def test_a_run_that_is_told_to_stop_waits_no_longer_than_its_grace(start: Callable[[str], Any], tmp_path: Path) -> None:
    a, stop = start("a-0"), StopSignal()
    stop.step_running = True
    watch = Told(tmp_path, stop=stop)
    stop.request(1.5)
    began = time.monotonic()
    with pytest.raises(StepAbandoned):
        watch.gather({"a-0": a.think_about_it.remote()}, "thinking")
    assert 1 < time.monotonic() - began < 4


def test_one_of_a_crew_that_dies_is_replaced_and_told_what_the_others_know(
    start: Callable[[str], Any], tmp_path: Path
) -> None:
    watch = Told(tmp_path, stall_s=60)
    arrived: list[list[str]] = []
    crew = ReplaceableWorkers(["a-0", "a-1"], start, watch, after_replace=arrived.append)
    crew.call("remember", "the model", doing="starting", replay=True)
    first = read_process_info("a-1", tmp_path)
    assert crew.call("answer", 7, doing="asking", only=["a-1"]) == {"a-1": 7}
    flag = str(tmp_path / "died")
    pids = crew.call("die_once", flag, doing="working")
    assert set(pids) == {"a-0", "a-1"}
    assert len({*pids.values()}) == 2
    assert crew.call("memory", doing="asking") == {"a-0": ["the model"], "a-1": ["the model"]}
    assert len(arrived) == 1
    assert [e["worker"] for e in watch.events] == arrived[0]
    assert "another one takes its place" in watch.notes[0]
    assert first


def test_nobody_is_started_who_would_come_in_vain(start: Callable[[str], Any], tmp_path: Path) -> None:
    def vain(lost: dict[str, WorkerLost]) -> None:
        raise WorkerLost(f"in vain for {', '.join(lost)}: {lost['a-1']}")

    started: list[str] = []
    watch = Told(tmp_path, stall_s=60)
    crew = ReplaceableWorkers(
        ["a-0", "a-1"], lambda name: started.append(name) or start(name), watch, before_replace=vain
    )
    with pytest.raises(WorkerLost, match="in vain for a-1: working: a-1 died"):
        crew.call("die", doing="working", only=["a-1"])
    assert started == ["a-0", "a-1"]
    assert crew.call("answer", 7, doing="asking", only=["a-0"]) == {"a-0": 7}


def test_of_those_a_crew_waits_for_only_its_own_are_replaced(start: Callable[[str], Any], tmp_path: Path) -> None:
    watch = Told(tmp_path, stall_s=60)
    crew, other = ReplaceableWorkers(["a-0"], start, watch), start("b-0")
    flag = str(tmp_path / "died")
    found = crew.call("die_once", flag, doing="taking", concurrent_calls={"b-0": other.answer.remote(8)})
    assert found["b-0"] == 8
    assert [e["worker"] for e in watch.events] == ["a-0"]
    with pytest.raises(WorkerLost, match="taking: b-0 died"):
        crew.call("think_about_it", doing="taking", concurrent_calls={"b-0": other.die.remote()})
    assert len(watch.events) == 1


def test_a_crew_whose_new_workers_die_too_gives_up(start: Callable[[str], Any], tmp_path: Path) -> None:
    watch = Told(tmp_path, stall_s=60)
    crew = ReplaceableWorkers(["a-0"], start, watch)
    with pytest.raises(WorkerLost, match="working: a-0 died"):
        crew.call("die", doing="working")
    assert len(watch.events) == 2, "three tries"


def test_with_one_try_nobody_is_replaced_and_who_waits_for_the_lost_one_is_not_waited_for(
    start: Callable[[str], Any], tmp_path: Path
) -> None:
    watch = Told(tmp_path, stall_s=60)
    crew, other = ReplaceableWorkers(["a-0", "a-1"], start, watch), start("b-0")
    crew.call("answer", 1, doing="starting")
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"taking: a-\d died"):
        crew.call(
            "die_once",
            str(tmp_path / "died"),
            doing="taking",
            concurrent_calls={"b-0": other.think_about_it.remote()},
            max_attempts=1,
        )
    assert time.monotonic() - began < 20
    assert not watch.events


def test_nobody_is_replaced_when_the_run_is_over(ray: Any, start: Callable[[str], Any], tmp_path: Path) -> None:
    """Its workers are ended then, and a thread of the driver may still wait for one."""
    watch = Told(tmp_path, stall_s=60)
    crew = ReplaceableWorkers(["a-0"], start, watch)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(crew.call, "think_about_it", doing="scoring")
        time.sleep(1)
        watch.stop.end_now()
        ray.kill(crew.actors["a-0"])
        with pytest.raises(StepAbandoned):
            waiting.result(timeout=10)
    crew = ReplaceableWorkers(["a-1"], start, watch)
    with pytest.raises(StepAbandoned):
        crew.replace({"a-1": WorkerLost("it died")}, dict(crew.actors))
    watch.stop.mark_lost("Ray's raylet has ended")
    with pytest.raises(WorkerLost, match="raylet"):
        crew.replace({"a-1": WorkerLost("it died")}, dict(crew.actors))
    assert not watch.events
    assert not watch.notes
