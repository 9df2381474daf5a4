"""Forks workers from a process that has imported their libraries. On one machine, imports are most of a start.

    driver ─ starts ─▶ forkserver: torch, transformers, deepspeed ─ forks ─▶ policy ranks, critic, reference
                          └─ forks ─▶ forkserver: vLLM as well ─ forks ─▶ rollout-0, rollout-1

Ray starts a worker by a command, the `py_executable` of its runtime environment. Here that command is this file, run as
a script: it sends its arguments, environment and folder to a forkserver, which forks the worker. The command then lives
and ends with the worker. Where no forkserver answers, the command becomes the worker itself, which only takes longer.

A worker ends with its forkserver, and a forkserver with the driver. A forkserver that has ended is not replaced.
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

MODELS, ENGINES = KINDS = ("models", "engines")  # the two forkservers, and the names of their sockets
OOM_SCORE = Path("/proc/self/oom_score_adj")
REQUEST_TIMEOUT_S = 10.0  # for a client to send its request
PR_SET_PDEATHSIG = 1


def start_forkservers(folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts both forkservers, with their sockets in `folder`. A worker later gets its own environment."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "workers.start.worker_forkserver", "serve", str(folder), str(os.getpid())]
    with log.open("a") as out:
        return subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
        )


def fork_command(folder: Path, kind: str) -> str:
    """Returns the shell command that starts a worker of this kind."""
    import shlex

    return shlex.join([sys.executable, "-I", "-S", __file__, str(folder / kind)])


# --- the command -----------------------------------------------------------------------------------------------------


def request_worker(address: str, arguments: list[str]) -> int:
    """Has a worker forked, waits until it has ended, and returns its exit code."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    request["oom_score"] = OOM_SCORE.read_text()  # Ray's choice of which process the kernel kills first
    started = exit_code = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        started, exit_code = connection.recv(1), connection.recv(1)
    if not started:
        os.execv(sys.executable, [sys.executable, *arguments])
    return exit_code[0] if exit_code else 1


# --- the forkserver --------------------------------------------------------------------------------------------------


def serve(folder: Path, driver: int) -> None:
    """Imports the libraries, then forks workers on request. Requests that come earlier wait."""
    import gc

    from workers.start.imports import hide_modules  # not above: the command runs this file alone

    gc.disable()  # imports make a million objects and no garbage
    exit_with_parent(driver)
    sockets = {kind: socket.socket(socket.AF_UNIX) for kind in KINDS}
    for kind, listener in sockets.items():
        listener.bind(str(folder / kind))
        listener.listen(64)
    # Ray reads a worker's environment when it is imported; vLLM works without it. A fork would lose MLflow's thread.
    with hide_modules("ray", "mlflow"):
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        parent = os.getpid()
        if os.fork():
            import deepspeed  # noqa: F401

            kind = MODELS
        else:
            exit_with_parent(parent)
            import vllm.v1.worker.cpu_worker  # noqa: F401
            from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

            kind = ENGINES
    for other in set(KINDS) - {kind}:
        sockets[other].close()
    gc.freeze()  # a collection would write to pages that the workers share
    WorkerForkserver(sockets[kind]).run()


class WorkerForkserver:
    """Serves one socket. Each connection belongs to one worker: when one of them ends, so does the other."""

    def __init__(self, listener: socket.socket):
        self.listener, self.pid = listener, os.getpid()
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.fork_worker)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is not key:
                    continue  # unregistered by an event of the same round
                try:
                    key.data()
                except (OSError, ValueError) as error:  # no more processes or files, or a malformed request
                    log_line(f"{type(error).__name__}: {error}")

    def fork_worker(self) -> None:
        connection, _ = self.listener.accept()
        try:
            request = read_request(connection)
            pid = os.fork()
        except (OSError, ValueError):
            connection.close()
            raise
        if not pid:
            self.close_inherited(connection)
            run_as_worker(request, self.pid)
        pidfd = os.pidfd_open(pid)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.kill_worker(connection, pidfd))
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self.report_exit(connection, pidfd, pid))
        log_line(f"process {pid} is a worker now")
        connection.send(b".")

    def kill_worker(self, connection: socket.socket, pidfd: int) -> None:
        """Called when the command has ended: its worker must end too."""
        self.selector.unregister(connection)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def report_exit(self, connection: socket.socket, pidfd: int, pid: int) -> None:
        """Called when a worker has ended: sends its exit code to the command."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log_line(f"process {pid} has ended with {code}")
        self.selector.unregister(pidfd)
        os.close(pidfd)
        if connection.fileno() in self.selector.get_map():
            self.selector.unregister(connection)
        with connection, contextlib.suppress(OSError):
            connection.send(bytes([code if code >= 0 else 128 - code]))

    def close_inherited(self, connection: socket.socket) -> None:
        """Closes in a new worker the files that belong to the forkserver."""
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()
        connection.close()


def read_request(connection: socket.socket) -> dict[str, Any]:
    connection.settimeout(REQUEST_TIMEOUT_S)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    connection.settimeout(None)
    return request


def log_line(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        print(text, flush=True)


def run_as_worker(request: dict[str, Any], forkserver: int) -> None:
    """Becomes the worker: runs its script as if Python had been started with these arguments.

    Imported modules stay imported.
    """
    import gc
    import random
    import runpy
    import traceback

    code = 1
    try:
        exit_with_parent(forkserver)
        os.setpgid(0, 0)  # Ray kills what a worker leaves behind by its process group
        OOM_SCORE.write_text(request["oom_score"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = request["arguments"]
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


def exit_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(request_worker(sys.argv[1], sys.argv[2:]))
