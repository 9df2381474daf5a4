"""The parent of a driver: it restarts a lost driver, forwards signals, and takes the driver with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from launch.supervise import EXIT_LOST

ROOT = Path(__file__).parent.parent.parent
LINES = """
import os, signal, sys, time
from pathlib import Path
from launch.supervise import EXIT_LOST, run_with_restarts
folder = Path(sys.argv[1])
def run_driver(cause):
    count = len(list(folder.glob("run-*")))
    (folder / f"run-{count}").write_text(cause)
    print(f"driver {count}", os.getpid(), flush=True)
"""


def program(tmp_path: Path, body: str, restarts: int = 2, wrapper: Sequence[str] = ()) -> subprocess.Popen[str]:
    file = tmp_path / "program.py"
    body = "".join(f"    {line}\n" for line in body.splitlines())
    file.write_text(
        f"{LINES}{body}\nsys.exit(run_with_restarts(run_driver, {restarts}, lambda text: print(text, flush=True), "
        "lambda: print('cleaned up', flush=True), lambda: len(list(folder.glob('step-*')))))\n"
    )
    return subprocess.Popen(
        [*wrapper, sys.executable, str(file), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=hear_signals,
    )


def hear_signals() -> None:
    """Tests that run in the background inherit that these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


def causes(tmp_path: Path) -> list[str]:
    """Why each driver was started."""
    return [p.read_text() for p in sorted(tmp_path.glob("run-*"))]


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_a_driver_that_ends_by_itself_is_not_restarted(tmp_path: Path, code: int) -> None:
    assert wait_for_end(program(tmp_path, f"return {code}"))[0] == code
    assert causes(tmp_path) == [""]


def test_a_driver_that_lost_a_worker_is_restarted_with_the_cause(tmp_path: Path) -> None:
    code, output = wait_for_end(program(tmp_path, "return EXIT_LOST if count < 2 else 0"))
    assert code == 0
    assert causes(tmp_path) == ["", "it lost a worker", "it lost a worker"]
    assert "going on from the last checkpoint (2 of run.max_restarts=2)" in output


def test_a_killed_driver_is_restarted(tmp_path: Path) -> None:
    code, _ = wait_for_end(program(tmp_path, "if count == 0: os.kill(os.getpid(), signal.SIGKILL)\nreturn 0"))
    assert code == 0
    assert causes(tmp_path) == ["", "the driver was ended by SIGKILL"]


def test_a_driver_that_exits_without_a_word_is_restarted(tmp_path: Path) -> None:
    code, _ = wait_for_end(program(tmp_path, "if count == 0: os._exit(1)\nreturn 0"))
    assert code == 0
    assert causes(tmp_path) == ["", "the driver ended without a word (exit code 1), as when Ray is lost"]


def test_a_driver_that_is_stopped_and_loses_its_workers_is_not_restarted(tmp_path: Path) -> None:
    body = """signal.signal(signal.SIGTERM, lambda n, f: os._exit(1))
print("ready", flush=True)
time.sleep(20)"""
    process = program(tmp_path, body)
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        pass
    process.terminate()
    code, output = wait_for_end(process)
    assert code == 0
    assert len(causes(tmp_path)) == 1
    assert "goes on from the last checkpoint" in output


def test_restarts_end_after_max_restarts(tmp_path: Path) -> None:
    code, output = wait_for_end(program(tmp_path, "return EXIT_LOST", restarts=1))
    assert code == 1
    assert len(causes(tmp_path)) == 2
    assert "run.max_restarts is 1: the same command goes on" in output
    assert "cleaned up" in output


def test_without_restarts_a_lost_driver_stays_lost(tmp_path: Path) -> None:
    assert wait_for_end(program(tmp_path, "return EXIT_LOST", restarts=0))[0] == 1
    assert len(causes(tmp_path)) == 1


def test_restarts_are_counted_since_the_last_checkpoint(tmp_path: Path) -> None:
    """A month on spot nodes loses more drivers than any limit, and all is well."""
    body = "if count < 8 and count % 2: (folder / f'step-{count}').touch()\nreturn EXIT_LOST if count < 9 else 0"
    code, output = wait_for_end(program(tmp_path, body, restarts=2))
    assert code == 0
    assert len(causes(tmp_path)) == 10
    assert "(3 of" not in output


@pytest.mark.long
def test_drivers_that_get_no_further_are_started_less_and_less_often(tmp_path: Path) -> None:
    """A cluster that restarts needs a minute; ten drivers within a second would not see it again."""
    began = time.monotonic()
    code, output = wait_for_end(program(tmp_path, "return EXIT_LOST if count < 4 else 0", restarts=5))
    assert code == 0
    assert time.monotonic() - began > 1 + 2 + 4
    waits = [line.partition(")")[2] for line in output.splitlines() if "going on" in line]
    assert waits == ["", ", in 1 s", ", in 2 s", ", in 4 s"]


def test_a_signal_between_two_drivers_ends_the_run(tmp_path: Path) -> None:
    codes, runs = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 0}, {}
    for number in codes:  # all at a time: each takes seven seconds
        (tmp_path / number.name).mkdir()
        runs[number] = program(tmp_path / number.name, "return EXIT_LOST", restarts=9)
    for process in runs.values():
        assert process.stdout
        while "in 8 s" not in process.stdout.readline():
            pass
    began = time.monotonic()
    for number, process in runs.items():
        process.send_signal(number)
    for number, process in runs.items():
        code, output = wait_for_end(process)
        assert (code, time.monotonic() - began < 5) == (codes[number], True), number
        assert "cleaned up" in output
        assert "goes on from the last checkpoint" in output
        assert len(causes(tmp_path / number.name)) == 5


def test_a_cluster_that_is_gone_for_a_while_is_waited_for_only_by_a_run_that_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.ray_session.connect import NoCluster
    from launch.tools.cli import runs

    codes = []

    def run_with_restarts(run_driver: Callable[[str], int], *_: object, **more: object) -> int:
        codes.extend([run_driver(""), run_driver("it lost a worker")])
        return 0

    def no_cluster(*_: object, **more: object) -> None:
        raise NoCluster("cluster.address: no Ray cluster answers at 10.0.0.1:6379.")

    monkeypatch.setattr("launch.supervise.run_with_restarts", run_with_restarts)
    monkeypatch.setattr("launch.train.train", no_cluster)
    assert runs.train.callback
    runs.train.callback(str(ROOT / "configs" / "tiny_cpu.yaml"), (f"run.dir={tmp_path}",))
    assert codes == [2, EXIT_LOST]


@pytest.mark.parametrize("stderr", [False, True])
def test_a_driver_goes_on_after_the_reader_of_its_output_has_gone(tmp_path: Path, stderr: bool) -> None:
    body = f"""from launch.printing import plain_console, print_line
os.dup2(1, 2)
while not (folder / "gone").exists(): time.sleep(0.01)
for word in "abc": print_line(plain_console(stderr={stderr}), word)
return 0 if count == 0 else 1"""
    process = program(tmp_path, body)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    (tmp_path / "gone").touch()
    assert process.wait(20) == 0
    assert causes(tmp_path) == [""]


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_stops_a_run_in_good_order(tmp_path: Path, nohup: bool) -> None:
    body = """signal.signal(signal.SIGTERM, lambda n, f: os._exit(7))
print("ready", flush=True)
time.sleep(1 if folder.joinpath("nohup").exists() else 20)
return 5"""
    if nohup:
        (tmp_path / "nohup").touch()
    process = program(tmp_path, body, wrapper=["nohup"] if nohup else [])
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGHUP)
    assert wait_for_end(process)[0] == (5 if nohup else 0)
    assert len(causes(tmp_path)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_reach_the_driver_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    body = f"""received = []
for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, lambda n, f: received.append(n))
print("ready", flush=True)
while not received: time.sleep(0.01)
time.sleep(0.3)
return {code} if received == [{int(number)}] else 1"""
    process = program(tmp_path, body)
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(number)
    assert wait_for_end(process)[0] == code
    assert len(causes(tmp_path)) == 1


def test_a_parent_that_is_killed_takes_the_driver_with_it(tmp_path: Path) -> None:
    process = program(tmp_path, "time.sleep(60)")
    assert process.stdout
    pid = int(process.stdout.readline().split()[-1])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
