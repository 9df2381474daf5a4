"""Workers forked from a process that has imported what they need: on one machine, imports are most of what a start costs.

    driver ─ starts ─▶ nursery: torch, transformers, deepspeed ─ forks ─▶ ranks, reference
                          └─ forks ─▶ nursery: vLLM as well ─ forks ─▶ rollout-0, rollout-1

Ray starts a worker by a command, the `py_executable` of its runtime environment. That command is this file, run as a script: it sends
its arguments, environment and folder to a nursery, which forks the worker, and then it lives and ends as the worker does.
Where no nursery answers it becomes the worker itself, which takes longer and is the same otherwise.

A worker ends with its nursery, and the nursery with the driver. No other takes its place.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS, ENGINES = KINDS = ("models", "engines")  # what a nursery is for, and the name of its socket
OOM_SCORE = Path("/proc/self/oom_score_adj")
REQUEST_TIMEOUT_S = 10.0  # with somebody who has knocked and says nothing
PR_SET_PDEATHSIG = 1


def start_forkservers(folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the nurseries, with sockets in this folder. They have this environment until they are a worker."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "workers.supervision.worker_forkserver", "serve", str(folder), str(os.getpid())]
    with log.open("a") as out:
        return subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
        )


def fork_command(folder: Path, kind: str) -> str:
    """The command that starts a worker of this kind, as a shell reads it."""
    import shlex

    return shlex.join([sys.executable, "-I", "-S", __file__, str(folder / kind)])


# --- the command -----------------------------------------------------------------------------------------------------


def request_worker(door: str, arguments: list[str]) -> int:
    """Has the worker forked. Returns its exit code when it has ended."""
    words = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    words["oom_score"] = OOM_SCORE.read_text()  # Ray's choice of who goes first when memory is short
    begun = end = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        line.sendall(json.dumps(words).encode() + b"\n")
        begun, end = line.recv(1), line.recv(1)
    if not begun:
        os.execv(sys.executable, [sys.executable, *arguments])
    return end[0] if end else 1


# --- the nursery -----------------------------------------------------------------------------------------------------


def serve(folder: Path, driver: int) -> None:
    """Imports, then forks whoever is asked for. Who asks before that waits."""
    import gc

    from workers.supervision.imports import hide_modules  # not above: the command runs this file alone

    gc.disable()  # imports make a million objects and no garbage
    exit_with_parent(driver)
    doors = {kind: socket.socket(socket.AF_UNIX) for kind in KINDS}
    for kind, door in doors.items():
        door.bind(str(folder / kind))
        door.listen(64)
    # Ray reads a worker's environment when it is imported; vLLM does without. MLflow starts a thread, which a fork would lose.
    with hide_modules("ray", "mlflow"):
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        nursery = os.getpid()
        if os.fork():
            import deepspeed  # noqa: F401

            kind = MODELS
        else:
            exit_with_parent(nursery)
            import vllm.v1.worker.cpu_worker  # noqa: F401
            from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

            kind = ENGINES
    for other in set(KINDS) - {kind}:
        doors[other].close()
    gc.freeze()  # what is shared stays shared
    WorkerForkserver(doors[kind]).run()


class WorkerForkserver:
    def __init__(self, door: socket.socket):
        self.door, self.pid = door, os.getpid()
        self.selector = selectors.DefaultSelector()
        self.selector.register(door, selectors.EVENT_READ, self.fork_worker)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is not key:
                    continue  # of somebody who went a moment ago
                try:
                    key.data()
                except (OSError, ValueError) as error:  # no more processes or files, or words that make no sense
                    log_line(f"{type(error).__name__}: {error}")

    def fork_worker(self) -> None:
        """Somebody asks for a worker."""
        line, _ = self.door.accept()
        try:
            words = read_request(line)
            pid = os.fork()
        except (OSError, ValueError):
            line.close()
            raise
        if not pid:
            self.close_inherited(line)
            run_as_worker(words, self.pid)
        end = os.pidfd_open(pid)
        self.selector.register(line, selectors.EVENT_READ, lambda: self.kill_worker(line, end))
        self.selector.register(end, selectors.EVENT_READ, lambda: self.report_exit(line, end, pid))
        log_line(f"process {pid} is a worker now")
        line.send(b".")

    def kill_worker(self, line: socket.socket, end: int) -> None:
        """Who asked is gone: so is the worker."""
        self.selector.unregister(line)
        signal.pidfd_send_signal(end, signal.SIGKILL)

    def report_exit(self, line: socket.socket, end: int, pid: int) -> None:
        """A worker has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log_line(f"process {pid} has ended with {code}")
        self.selector.unregister(end)
        os.close(end)
        if line.fileno() in self.selector.get_map():
            self.selector.unregister(line)
        with line, contextlib.suppress(OSError):
            line.send(bytes([code if code >= 0 else 128 - code]))

    def close_inherited(self, line: socket.socket) -> None:
        """In a new worker: what is the nursery's only."""
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()
        line.close()


def read_request(line: socket.socket) -> dict[str, Any]:
    """What is asked for."""
    line.settimeout(REQUEST_TIMEOUT_S)
    with line.makefile("rb") as words:
        found: dict[str, Any] = json.loads(words.readline())
    line.settimeout(None)
    return found


def log_line(what: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        print(what, flush=True)


def run_as_worker(words: dict[str, Any], nursery: int) -> None:
    """Python from here on, as if it had been started with these arguments; what is imported stays so."""
    import gc
    import random
    import runpy
    import traceback

    code = 1
    try:
        exit_with_parent(nursery)
        os.setpgid(0, 0)  # Ray ends what a worker leaves behind by its group
        OOM_SCORE.write_text(words["oom_score"])
        os.environ.clear()
        os.environ.update(words["environment"])
        os.chdir(words["folder"])
        sys.argv = words["arguments"]
        random.seed()
        sys.modules["numpy"].random.seed()
        gc.enable()
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def exit_with_parent(process: int) -> None:
    """If it ends, so does this one."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != process:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(request_worker(sys.argv[1], sys.argv[2:]))
