"""The supervisor's end of a process: starts it, exchanges messages, and kills it with all that it started."""

import contextlib
import os
import pickle
import signal
import socket
import struct
import time
import uuid
from json import loads
from typing import Any

from rlsys.config.plugins import PROCESS_MARK
from rlsys.sandbox import KILL_TIMEOUT_S, kill_marked
from workers.processes.forkserver import FORKSERVER

KILLED = "killed by SIGKILL"  # how a process ended: seldom by its own doing
EXIT_S = 5.0  # for a process that has closed its end to exit, so that we see how: a full machine takes its time


class ProcessHandle:
    """Never blocks: a process that hangs in the middle of a message must not hold up the supervisor thread.

    `module` is what the process runs, see `workers.processes.forkserver`; `settings` is the first message to it.
    """

    def __init__(self, module: str, settings: Any):
        self.socket, child_socket = socket.socketpair()
        self.mark = uuid.uuid4().hex
        with child_socket:
            self.child = FORKSERVER.fork(module, settings, self.mark, child_socket)
        self.socket.setblocking(False)
        self.unsent, self.unread = bytearray(), bytearray()
        self.closed = False  # the process has closed its end
        self.started_at = time.monotonic()
        self.ready_info: dict[str, Any] | None = (
            None  # its `ready` message; None: the functions are still being imported
        )
        self.idle = False  # whether its main thread can take samples
        self.send(settings)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        # As a multiprocessing.Connection reads it.
        self.unsent += struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the process has died: `read_messages` notices
            self.unsent.clear()

    def read_messages(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived completely."""
        try:
            while data := self.socket.recv(1 << 20):
                self.unread += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages, start = [], 0
        while len(self.unread) >= start + 4:
            end = start + 4 + int.from_bytes(self.unread[start : start + 4], "big")
            if len(self.unread) < end:
                break
            messages.append(loads(bytes(self.unread[start + 4 : end])))
            start = end
        del self.unread[:start]
        return messages

    def kill(self) -> str:
        """Kills the process and all that it started. Returns how the process ended."""
        # The end of a process that has closed its connection tells why.
        lost = self.closed and self.child.exit_code(EXIT_S) is None
        if pid := self.child.pid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        code = self.child.exit_code(KILL_TIMEOUT_S)
        code = -signal.SIGKILL if code is None else code
        self.child.close()
        self.socket.close()
        kill_marked(f"{PROCESS_MARK}={self.mark}".encode())
        if lost:
            return "it had closed its connection or written to it, and was killed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
