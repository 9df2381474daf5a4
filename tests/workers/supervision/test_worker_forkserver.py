"""Processes forked from the nurseries, started by the command that Ray is given."""

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
from workers.supervision.worker_forkserver import ENGINES, MODELS, fork_command, start_forkservers

SCRIPT = """
import json, os, sys, time
there = sorted({"ray", "torch", "deepspeed", "vllm"} & {*sys.modules})
found = {"pid": os.getpid(), "parent": os.getppid(), "there": there, "arguments": sys.argv[1:], "folder": os.getcwd(),
         "colour": os.environ.get("COLOUR"), "oom": open("/proc/self/oom_score_adj").read(), "open": os.listdir("/proc/self/fd"),
         "number": sys.modules["numpy"].random.rand() if "numpy" in sys.modules else 0.0}
with open(sys.argv[1] + ".part", "w") as out:
    json.dump(found, out)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""
Asked = Callable[..., tuple[subprocess.Popen[bytes], dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of nurseries that are up, or coming up."""
    folder = tmp_path_factory.mktemp("n")
    nursery = start_forkservers(folder, CPU_ENVIRONMENT, folder / "log")
    until(lambda: (folder / ENGINES).exists())
    yield folder
    nursery.kill()
    nursery.wait(10)


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> Iterator[Asked]:
    """`asked(MODELS, 0.5)` is the command, and what the process said that lives for half a second."""
    commands = []

    def ask(kind: str, seconds: float, folder: Path = folder) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        script, said = tmp_path / "script.py", tmp_path / f"said-{len(commands)}"
        script.write_text(SCRIPT)
        command = [*shlex.split(fork_command(folder, kind)), str(script), str(said), str(seconds)]
        commands.append(
            subprocess.Popen(
                ["choom", "-n", "500", "--", *command],
                env=os.environ | {"COLOUR": "red"},
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
            )
        )
        until(said.exists)
        return commands[-1], json.loads(said.read_text())

    yield ask
    for command in commands:
        command.kill()
        command.wait(10)


def until(there: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("kind", "there"), [(MODELS, ["deepspeed", "torch"]), (ENGINES, ["torch", "vllm"])])
def test_a_process_has_what_it_needs_imported_and_is_else_as_if_it_had_been_started(
    asked: Asked, tmp_path: Path, kind: str, there: list[str]
) -> None:
    command, said = asked(kind, 0)
    assert command.wait(10) == 7
    assert said["there"] == there, "Ray reads its environment when it is imported"
    assert said["arguments"] == [str(tmp_path / "said-0"), "0"]
    assert (said["folder"], said["colour"], said["oom"]) == (str(tmp_path), "red", "500\n")
    assert said["pid"] != command.pid
    assert psutil.Process(said["parent"]).num_threads() == 1, "a fork has none of the others"


def test_a_process_that_is_killed_ends_the_command(asked: Asked) -> None:
    command, said = asked(MODELS, 1000)
    os.kill(said["pid"], signal.SIGKILL)
    assert command.wait(10) == 128 + signal.SIGKILL


def test_a_command_that_is_killed_ends_the_process(asked: Asked) -> None:
    command, said = asked(MODELS, 1000)
    command.kill()
    until(lambda: gone(said["pid"]), 10)


def test_several_live_side_by_side(asked: Asked) -> None:
    (one, first), (_, said) = asked(MODELS, 0.5), asked(MODELS, 1000)
    assert len(said["open"]) == len(first["open"]) <= 5, "nothing of the nursery's, or of each other's"
    assert said["number"] != first["number"]
    assert one.wait(10) == 7
    assert not gone(said["pid"])


def test_who_asks_and_goes_who_says_nothing_and_who_talks_nonsense_do_no_harm(asked: Asked, folder: Path) -> None:
    _, said = asked(MODELS, 1000)
    for words in (b"", b"nonsense\n", b'{"arguments": [], "environment": {}, "folder": "/", "oom_score": "0"}\n'):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(folder / MODELS))
            line.sendall(words)
    _, after = asked(MODELS, 0)
    assert after["parent"] == said["parent"]
    assert not gone(said["pid"])


def test_who_dies_while_the_nursery_is_busy_does_no_harm(asked: Asked) -> None:
    command, said = asked(MODELS, 1000)
    assert said["parent"] != os.getpid(), "no nursery was there"
    nursery = psutil.Process(said["parent"])
    nursery.suspend()
    os.kill(said["pid"], signal.SIGKILL)
    command.kill()
    nursery.resume()
    assert asked(MODELS, 0)[1]["parent"] == nursery.pid


def test_without_a_nursery_the_command_is_the_process(asked: Asked, tmp_path: Path) -> None:
    command, said = asked(MODELS, 0, folder=tmp_path / "nobody")
    assert command.wait(10) == 7
    assert (said["pid"], said["there"]) == (command.pid, [])


def test_processes_end_with_their_nursery_and_nurseries_with_the_driver(asked: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "n"
    driver = subprocess.Popen(
        [sys.executable, "-c", f"from workers.supervision.worker_forkserver import start_forkservers; from pathlib import Path; folder = Path({str(folder)!r}); start_forkservers(folder, {{}}, folder / 'log'); input()"],
        stdin=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: len(psutil.Process(driver.pid).children(recursive=True)) == 2)
    nurseries = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
    _, said = asked(MODELS, 1000, folder=folder)
    driver.kill()
    driver.wait(10)
    until(lambda: all(map(gone, [*nurseries, said["pid"]])), 10)
