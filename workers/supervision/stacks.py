"""What a worker that says nothing is doing: the Python stacks of its process, taken from outside.

py-spy reads the memory of the process, so it needs nothing of it, not even that it runs. Where it may not, the process is sent
SIGUSR1, and its `faulthandler` writes them.
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

from workers.supervision.process_registry import ProcessInfo, find_process, read_process_info, run_on_nodes

PY_SPY_TIMEOUT_S = 4.0  # with py-spy


def enable_stack_dumps(name: str, logs: Path) -> None:
    """Called in a worker: SIGUSR1 writes its stacks from now on."""
    faulthandler.enable()
    with contextlib.suppress(OSError):  # on another host without the run directory
        faulthandler.register(signal.SIGUSR1, stacks_file(name, logs).open("w"), all_threads=True)


def stacks_file(name: str, logs: Path) -> Path:
    return logs / f"{name}.stacks"


def collect_stacks(names: list[str], logs: Path) -> dict[str, str]:
    """The stacks of each worker, or why there are none. Takes seconds, whatever state the workers are in."""
    places = {name: place for name in names if (place := read_process_info(name, logs))}
    found = run_on_nodes(process_stacks, {name: (str(stacks_file(name, logs)),) for name in places}, places)
    unknown = "it has not said where it is: it is still starting, or on a host without the run directory"
    return {name: found.get(name, "its node does not answer" if name in places else unknown) for name in names}


def process_stacks(place: ProcessInfo, written: str) -> str:
    """Of a process of this host; `written` is where it writes them itself."""
    process = find_process(place)
    if process is None:
        return f"process {place.pid} is gone"
    state = process.status()
    head = f"process {place.pid}, {state}\n"
    if found := run_py_spy(place.pid):
        return head + found
    if state == psutil.STATUS_STOPPED:
        return head + "a signal has stopped it, so it cannot say more"
    with contextlib.suppress(OSError):
        before = os.path.getsize(written)
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while os.path.getsize(written) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)
        return head + Path(written).read_bytes()[before:].decode(errors="replace")
    return head + "no stacks: py-spy may not read it, and it has no file to write them to"


def run_py_spy(pid: int) -> str:
    """What py-spy says, or nothing where it is not there or not allowed."""
    program = shutil.which(
        "py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout if said.returncode == 0 else ""


def innermost_calls(text: str) -> str:
    """The innermost calls of the main thread, for the screen."""
    first, *lines = text.splitlines() or [""]
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("Thread ", "Current thread "))]
    main = next((i for i in starts if "MainThread" in lines[i]), starts[-1] if starts else len(lines))
    calls = [line.strip() for line in lines[main + 1 : main + 4] if line.startswith(" ")]
    return first + (": " + " ← ".join(calls) if calls else "")
