"""Which processes a `.pid` file may have inspected and killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.fleet.process_registry import kill_processes, read_process_info
from workers.fleet.stacks import collect_stacks

NAME = "rollout-0"


@pytest.fixture
def sleeper() -> Iterator[Callable[[Any], subprocess.Popen[bytes]]]:
    """`sleeper(stdout)` starts a process of this user that is no worker."""
    started = []

    def start(output: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=output))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def register(process: subprocess.Popen[bytes], ray: Any, logs: Path) -> None:
    created = psutil.Process(process.pid).create_time()
    facts = {"node": ray.get_runtime_context().get_node_id(), "pid": process.pid, "created": created}
    (logs / f"{NAME}.pid").write_text(json.dumps(facts | {"log": "/dev/null"}))


def require_untouched(process: subprocess.Popen[bytes], logs: Path) -> None:
    assert "gone" in collect_stacks([NAME], logs)[NAME]
    assert kill_processes([NAME], logs) == set()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)


@pytest.mark.parametrize("log", ["absent", "another file", "a link to its output", "a link to /dev/null"])
def test_a_false_pid_file_touches_no_other_process(
    ray: Any, tmp_path: Path, sleeper: Callable[[Any], subprocess.Popen[bytes]], log: str
) -> None:
    """Neither with SIGKILL nor with SIGUSR1, which would end it too, and its stacks are not shown."""
    output, worker_log = tmp_path / "output.txt", tmp_path / f"{NAME}.log"
    with open(os.devnull if log == "a link to /dev/null" else output, "w") as file:
        process = sleeper(file)
    if log == "another file":
        worker_log.write_text("the worker says hello")
    elif log != "absent":
        worker_log.symlink_to(os.devnull if log == "a link to /dev/null" else output)
    register(process, ray, tmp_path)
    require_untouched(process, tmp_path)


def test_a_worker_of_another_name_is_not_taken_for_this_one(
    ray: Any, tmp_path: Path, start_worker: Callable[[str], Any]
) -> None:
    other = start_worker("a-0")
    ray.get(other.echo.remote(1))
    (tmp_path / f"{NAME}.pid").write_bytes((tmp_path / "a-0.pid").read_bytes())
    (tmp_path / f"{NAME}.log").write_text("")
    assert kill_processes([NAME], tmp_path) == set()
    assert ray.get(other.echo.remote(2)) == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_is_killed_even_if_it_is_stopped_and_its_log_has_grown(
    ray: Any, tmp_path: Path, start_worker: Callable[[str], Any], stopped: bool
) -> None:
    worker = start_worker("a-0")
    ray.get(worker.echo.remote(1))
    info = read_process_info("a-0", tmp_path)
    assert info
    with (tmp_path / "a-0.log").open("a") as log:
        log.write("more")
    if stopped:
        os.kill(info.pid, signal.SIGSTOP)
    assert kill_processes(["a-0"], tmp_path) == {"a-0"}
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(worker.echo.remote(2), timeout=60)
