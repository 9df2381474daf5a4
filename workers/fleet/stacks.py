"""What a stalled worker is doing: the Python stacks of its process, read from outside.

py-spy reads the memory of the process, which need not even run. Where py-spy is not allowed to, the process gets
SIGUSR1 and its `faulthandler` writes the stacks.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from workers.fleet.process_registry import ProcessInfo, find_process, read_process_infos, run_on_nodes

PY_SPY_TIMEOUT_S = 4.0


def enable_stack_dumps(name: str, logs: Path) -> None:
    """Called in a worker: from now on SIGUSR1 writes its stacks to a file."""
    faulthandler.enable()
    with contextlib.suppress(OSError):  # on another host without the run directory
        faulthandler.register(signal.SIGUSR1, stacks_file(name, logs).open("w"), all_threads=True)


def stacks_file(name: str, logs: Path) -> Path:
    return logs / f"{name}.stacks"


def collect_stacks(names: list[str], logs: Path) -> dict[str, str]:
    """Returns the stacks of each worker, or why there are none. Takes only seconds, in any state of the workers."""
    infos = read_process_infos(names, logs)
    stacks = run_on_nodes(process_stacks, {name: (str(stacks_file(name, logs)),) for name in infos}, infos)
    unknown = "its process is not registered: it is still starting, or on a host without the run directory"
    return {name: stacks.get(name, "its node does not answer" if name in infos else unknown) for name in names}


def process_stacks(info: ProcessInfo, dump_file: str) -> str:
    """Returns the stacks of a process of this host. `dump_file` is where its `faulthandler` writes."""
    process = find_process(info)
    if process is None:
        return f"process {info.pid} is gone"
    state = process.status()
    head = f"process {info.pid}, {state}\n"
    if stacks := run_py_spy(info.pid):
        return head + stacks
    if state == psutil.STATUS_STOPPED:
        return head + "no stacks: a signal has stopped it"
    with contextlib.suppress(OSError):
        size = os.path.getsize(dump_file)
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while os.path.getsize(dump_file) == size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)
        return head + Path(dump_file).read_bytes()[size:].decode(errors="replace")
    return head + "no stacks: py-spy may not read it, and it has no file to write them to"


def run_py_spy(pid: int) -> str:
    """Returns py-spy's dump, or "" where py-spy is missing or not allowed."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("py-spy", path=folders)
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def innermost_calls(stacks: str) -> str:
    """Returns the innermost calls of the main thread in one line, for the screen."""
    first, *lines = stacks.splitlines() or [""]
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("Thread ", "Current thread "))]
    main = next((i for i in starts if "MainThread" in lines[i]), starts[-1] if starts else len(lines))
    calls = [line.strip() for line in lines[main + 1 : main + 4] if line.startswith(" ")]
    return first + (": " + " ← ".join(calls) if calls else "")
