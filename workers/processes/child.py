"""What every process for a user's functions does first: it ends with its supervisor, and stays within its memory."""

import ctypes
import io
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rlsys.errors import ConfigError

PR_SET_PDEATHSIG = 1
MAX_OUTPUT = 64 << 20  # bytes that the process may print


def run_child(fd: int, parent: int, make_server: Callable[[Connection, Any], Callable[[], None]], doing: str) -> None:
    """Serves the supervisor at the other end of the socket `fd`.

    `make_server` imports the user's functions. If that fails, {"problem": sentence} is sent; `doing` names this step in it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    close_in_children(fd)
    sys.stdout, sys.stderr = open_output(1), open_output(2)
    connection = Connection(fd)
    try:
        settings = pickle.loads(connection.recv_bytes())
        if limit := settings.memory_mb << 20:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            serve = make_server(connection, settings)
        except ConfigError as error:
            return send_problem(connection, str(error))
        except BaseException as error:  # a user's file may raise anything, SystemExit included
            return send_problem(connection, f"{doing} raised {type(error).__name__}: {error}")
        serve()
    except EOFError:
        return


class LimitedOutput(io.FileIO):
    """Drops what is printed beyond a limit: it all goes into the worker's log, and must not fill the disk."""

    left = MAX_OUTPUT

    def write(self, data: Any) -> int:
        size = len(data)
        if 0 < self.left < size:
            data = bytes(data[: self.left]) + b"\n[this process has printed 64 MiB; what follows is left out]\n"
        if self.left > 0:
            super().write(data)
        self.left -= size
        return size


def open_output(fd: int) -> io.TextIOWrapper:
    raw: Any = LimitedOutput(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


def send_problem(connection: Connection, sentence: str) -> None:
    connection.send_bytes(json.dumps({"problem": sentence}).encode())


def close_in_children(fd: int) -> None:
    """Closes the socket in every child. If a child held it, the runner would not see that this process has ended."""
    os.set_inheritable(fd, False)
    open_fds = [fd]

    def close() -> None:
        while open_fds:  # a child of the child must not close a file of its own that has this number
            os.close(open_fds.pop())

    os.register_at_fork(after_in_child=close)
