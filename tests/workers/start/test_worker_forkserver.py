"""Workers forked by the forkservers, started by the command that Ray gets."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.rollout.engine_settings import CPU_ENVIRONMENT
from workers.start.worker_forkserver import ENGINES, MODELS, fork_command, start_forkservers

SCRIPT = """
import json, os, sys, time
imported = sorted({"ray", "torch", "deepspeed", "vllm"} & {*sys.modules})
facts = {"pid": os.getpid(), "parent": os.getppid(), "imported": imported, "arguments": sys.argv[1:], "folder": os.getcwd(),
         "color": os.environ.get("COLOR"), "oom": open("/proc/self/oom_score_adj").read(), "open": os.listdir("/proc/self/fd"),
         "number": sys.modules["numpy"].random.rand() if "numpy" in sys.modules else 0.0}
with open(sys.argv[1] + ".part", "w") as out:
    json.dump(facts, out)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
Launch = Callable[..., tuple[subprocess.Popen[bytes], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of running forkservers."""
    folder = tmp_path_factory.mktemp("n")
    forkserver = start_forkservers(folder, CPU_ENVIRONMENT, folder / "log")
    until(lambda: (folder / ENGINES).exists())
    yield folder
    forkserver.kill()
    forkserver.wait(10)


@pytest.fixture
def launch(folder: Path, tmp_path: Path) -> Iterator[Launch]:
    """`launch(MODELS, 0.5)` returns the command and the facts of its worker, which lives for half a second."""
    commands = []

    def start(kind: str, seconds: float, folder: Path = folder) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        script, facts = tmp_path / "script.py", tmp_path / f"facts-{len(commands)}"
        script.write_text(SCRIPT)
        command = [*shlex.split(fork_command(folder, kind)), str(script), str(facts), str(seconds)]
        commands.append(
            subprocess.Popen(
                ["choom", "-n", "500", "--", *command],
                env=os.environ | {"COLOR": "red"},
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
            )
        )
        until(facts.exists)
        return commands[-1], json.loads(facts.read_text())

    yield start
    for command in commands:
        command.kill()
        command.wait(10)


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("kind", "imported"), [(MODELS, ["deepspeed", "torch"]), (ENGINES, ["torch", "vllm"])])
def test_a_worker_has_its_libraries_imported_and_is_else_a_fresh_process(
    launch: Launch, tmp_path: Path, kind: str, imported: list[str]
) -> None:
    command, facts = launch(kind, 0)
    assert command.wait(10) == 7
    assert facts["imported"] == imported, "Ray reads its environment when it is imported"
    assert facts["arguments"] == [str(tmp_path / "facts-0"), "0"]
    assert (facts["folder"], facts["color"], facts["oom"]) == (str(tmp_path), "red", "500\n")
    assert facts["pid"] != command.pid
    assert psutil.Process(facts["parent"]).num_threads() == 1, "a fork has none of the others"


def test_a_killed_worker_ends_the_command(launch: Launch) -> None:
    command, facts = launch(MODELS, 1000)
    os.kill(facts["pid"], signal.SIGKILL)
    assert command.wait(10) == 128 + signal.SIGKILL


def test_a_killed_command_ends_the_worker(launch: Launch) -> None:
    command, facts = launch(MODELS, 1000)
    command.kill()
    until(lambda: gone(facts["pid"]), 10)


def test_several_workers_run_at_the_same_time(launch: Launch) -> None:
    (one, first), (_, facts) = launch(MODELS, 0.5), launch(MODELS, 1000)
    assert len(facts["open"]) == len(first["open"]) <= 5, "files of the forkserver and of other workers are closed"
    assert facts["number"] != first["number"]
    assert one.wait(10) == 7
    assert not gone(facts["pid"])


def test_bad_requests_and_clients_that_leave_do_no_harm(launch: Launch, folder: Path) -> None:
    _, facts = launch(MODELS, 1000)
    for request in (b"", b"nonsense\n", b'{"arguments": [], "environment": {}, "folder": "/", "oom_score": "0"}\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / MODELS))
            connection.sendall(request)
    _, after = launch(MODELS, 0)
    assert after["parent"] == facts["parent"]
    assert not gone(facts["pid"])


def test_a_worker_that_dies_while_the_forkserver_is_busy_does_no_harm(launch: Launch) -> None:
    command, facts = launch(MODELS, 1000)
    assert facts["parent"] != os.getpid(), "no forkserver answered"
    forkserver = psutil.Process(facts["parent"])
    forkserver.suspend()
    os.kill(facts["pid"], signal.SIGKILL)
    command.kill()
    forkserver.resume()
    assert launch(MODELS, 0)[1]["parent"] == forkserver.pid


def test_without_a_forkserver_the_command_becomes_the_worker(launch: Launch, tmp_path: Path) -> None:
    command, facts = launch(MODELS, 0, folder=tmp_path / "nobody")
    assert command.wait(10) == 7
    assert (facts["pid"], facts["imported"]) == (command.pid, [])


def test_workers_end_with_their_forkserver_and_forkservers_with_the_driver(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "n"
    driver = subprocess.Popen(
        [sys.executable, "-c", f"from workers.start.worker_forkserver import start_forkservers; from pathlib import Path; folder = Path({str(folder)!r}); start_forkservers(folder, {{}}, folder / 'log'); input()"],
        stdin=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: len(psutil.Process(driver.pid).children(recursive=True)) == 2)
    forkservers = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
    _, facts = launch(MODELS, 1000, folder=folder)
    driver.kill()
    driver.wait(10)
    until(lambda: all(map(gone, [*forkservers, facts["pid"]])), 10)
