"""Forks the processes that run users' functions from one that has imported their libraries, which is most of a start.

    handle ── size, pickle ForkRequest, and four descriptors ──▶ forkserver ── forks ──▶ process
           ◀── "pid <number>\\n"   on the descriptor `status`, when it is forked and in a session of its own
           ◀── "exit <code>\\n"    on the same, when it has ended; it is reaped when the handle closes `status`

Each process that supervises others has one forkserver. It is started with the first request, replaced if it is lost, and ends
with its supervisor. What it forked ends with it.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from rlsys.config.plugins import PROCESS_MARK

UNMARKED = "0" * 32  # a process writes its own mark over it
ANSWER_S = 60.0  # for a forkserver to fork: at the start it imports libraries


@dataclass(frozen=True)
class ForkRequest:
    module: str  # its `preload` is given the settings, and imports libraries; its `main` is what the process runs
    settings: Any
    mark: str
    environment: dict[str, str]
    folder: str
    path: list[str]  # sys.path


class ForkedProcess:
    """A process of the forkserver, as its supervisor sees it."""

    def __init__(self, status: socket.socket):
        self.status, self.answers = status, b""

    def pid(self) -> int | None:
        """Returns its number; None if it has been reaped, or the forkserver was lost before."""
        return None if self.status.fileno() < 0 else self._answer(b"pid", ANSWER_S)

    def exit_code(self, timeout_s: float) -> int | None:
        """Returns the exit code, or the negative number of the signal that ended it; None if it has not ended."""
        return self._answer(b"exit", timeout_s)

    def close(self) -> None:
        """Lets the process be reaped. Its number may then be another's."""
        self.status.close()

    def _answer(self, name: bytes, timeout_s: float) -> int | None:
        while True:
            for line in self.answers.splitlines(keepends=True):
                if line.startswith(name) and line.endswith(b"\n"):
                    return int(line.split()[1])
            try:
                self.status.settimeout(timeout_s)
                data = self.status.recv(64)
            except OSError:
                return None
            if not data:  # the forkserver has ended, and with it the process
                data = b"exit %d\n" % -signal.SIGKILL
                if name != b"exit":
                    return None
            self.answers += data


class Forkserver:
    """The forkserver of this process, for all its threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0  # the process that has started it: not one that forked this object
        self.connection = socket.socket(socket.AF_UNIX)
        self.process: subprocess.Popen[bytes]

    def fork(self, module: str, settings: Any, mark: str, connection: socket.socket) -> ForkedProcess:
        """Asks for a process that runs the module and has this end of a connection. Does not wait until it is there."""
        environment = os.environ | fixed_environment() | {"PYTHONUNBUFFERED": "1", PROCESS_MARK: mark}
        data = pickle.dumps(ForkRequest(module, settings, mark, environment, os.getcwd(), sys.path))
        status, its_status = socket.socketpair()
        with its_status, self.lock:
            descriptors = [connection.fileno(), its_status.fileno(), 1, 2]
            self.start()
            try:
                send_request(self.connection, data, descriptors)
            except OSError:  # it has just ended
                self.process.wait(ANSWER_S)
                self.start()
                send_request(self.connection, data, descriptors)
        return ForkedProcess(status)

    def start(self) -> None:
        """Starts it unless it runs."""
        if self.owner == os.getpid() and self.process.poll() is None:
            return
        self.connection.close()
        self.connection, its_end = socket.socketpair()
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.processes.forkserver", str(its_end.fileno())],
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | fixed_environment() | {PROCESS_MARK: UNMARKED},
            )
        self.owner = os.getpid()


FORKSERVER = Forkserver()


def fixed_environment() -> dict[str, str]:
    """Returns what does not depend on how the supervisor was started. A replacement goes through a set in the same order."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def send_request(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    socket.send_fds(connection, [struct.pack("!I", len(data))], descriptors)
    connection.sendall(data)


# --- in the forkserver -----------------------------------------------------------------------------------------------


class ForkLoop:
    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ, self.fork)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is key:  # not closed by an event of the same round
                    key.data()

    def fork(self) -> None:
        size, descriptors, _, _ = socket.recv_fds(self.connection, 4, 4)
        if not size:
            sys.exit()  # the supervisor has ended
        request = pickle.loads(receive(self.connection, struct.unpack("!I", size)[0]))
        with contextlib.suppress(Exception):  # the process will say it with its own words
            importlib.import_module(request.module).preload(request.settings)
        gc.collect()
        gc.freeze()  # a collection in a process would write to the pages that they share
        connection, status, *outputs = descriptors
        parent, pid = os.getpid(), os.fork()
        if not pid:
            for key in list(self.selector.get_map().values()):
                os.close(key.fd)
            self.selector.close()
            os.setsid()  # so that what it starts can be killed with it
            answer(socket.socket(fileno=status), "pid", os.getpid())
            run_module(request, connection, parent, outputs)
        for fd in (connection, *outputs):
            os.close(fd)
        answers, pidfd = socket.socket(fileno=status), os.pidfd_open(pid)
        self.selector.register(answers, selectors.EVENT_READ, lambda: self.reap(answers, pidfd, pid))
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self.report_exit(answers, pidfd, pid))

    def report_exit(self, status: socket.socket, pidfd: int, pid: int) -> None:
        self.selector.unregister(pidfd)
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        answer(status, "exit", result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def reap(self, status: socket.socket, pidfd: int, pid: int) -> None:
        """Called when the handle is closed. A process that it no longer knows of must not go on."""
        if pidfd in self.selector.get_map():
            self.selector.unregister(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)  # it may not be in a group of its own yet
        self.selector.unregister(status)
        status.close()
        os.close(pidfd)
        os.waitpid(pid, 0)


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            sys.exit()
        data += part
    return bytes(data)


def answer(status: socket.socket, name: str, number: int) -> None:
    with contextlib.suppress(OSError):  # the handle is closed
        status.sendall(f"{name} {number}\n".encode())


# --- in the process --------------------------------------------------------------------------------------------------


def run_module(request: ForkRequest, connection: int, parent: int, outputs: list[int]) -> None:
    """Runs the module's `main` as if Python had been started for it, but for libraries that are imported already."""
    for fd, copy in enumerate(outputs, 1):
        os.dup2(copy, fd)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path[:] = dict.fromkeys([request.folder, *filter(None, request.path)])
    sys.argv = [request.module]
    show_as([sys.executable, "-m", request.module], request.mark)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.import_module(request.module).main(connection, parent)
    sys.exit()


def show_as(command: list[str], mark: str) -> None:
    """Writes the command and the mark over what Linux shows of this process: they are where it was started with its own."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    command_start, command_end, start, end = map(int, fields[45:49])
    size = command_end - command_start
    shown = b"".join(os.fsencode(word) + b"\0" for word in command)[: size - 1]
    ctypes.memmove(command_start, shown.ljust(size, b"\0"), size)
    if (position := ctypes.string_at(start, end - start).find(f"{PROCESS_MARK}={UNMARKED}".encode())) >= 0:
        ctypes.memmove(start + position, f"{PROCESS_MARK}={mark}".encode(), len(PROCESS_MARK) + 1 + len(mark))


if __name__ == "__main__":
    ForkLoop(socket.socket(fileno=int(sys.argv[1]))).run()
