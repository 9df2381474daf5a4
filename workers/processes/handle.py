"""The supervisor's end of a process: starts it, exchanges messages, and kills it with all that it started."""

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from json import loads
from typing import Any

from rlsys.config.plugins import PROCESS_MARK

KILL_TIMEOUT_S = 5.0  # for the kernel to end killed processes
KILLED = "killed by SIGKILL"  # how a process ended: seldom by its own doing
EXIT_S = 5.0  # for a process that has closed its end to exit, so that we see how: a full machine takes its time


class ProcessHandle:
    """Never blocks: a process that hangs in the middle of a message must not hold up the supervisor thread.

    `module` is what the process runs, see `workers.processes.child`; `settings` is the first message to it.
    """

    def __init__(self, module: str, settings: Any):
        self.socket, child_socket = socket.socketpair()
        self.mark = uuid.uuid4().hex
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-m", module, str(child_socket.fileno()), str(os.getpid())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts can be killed with it
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"}
                | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), PROCESS_MARK: self.mark}
                | {"PYTHONHASHSEED": "0"},  # a replacement goes through a set in the same order
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            child_socket.close()
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
        lost = self.closed and not self._exits_by_itself()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        code = self.child.wait()
        self.socket.close()
        mark, deadline = f"{PROCESS_MARK}={self.mark}".encode(), time.monotonic() + KILL_TIMEOUT_S
        while sum(_kill_if_marked(int(name), mark) for name in os.listdir("/proc") if name.isdigit()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # until they are gone; the next round finds what they have started meanwhile
        if lost:
            return "it had closed its connection or written to it, and was killed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _exits_by_itself(self) -> bool:
        """Waits a moment for the process to exit. It is not reaped yet, so its number is still its own."""
        deadline = time.monotonic() + EXIT_S
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self.child.returncode is None and os.waitid(os.P_PID, self.child.pid, look) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kills a process that has the mark, even in a session or process group of its own."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark not in file.read().split(b"\0"):
                return False
        os.kill(pid, signal.SIGKILL)
        return True
    except OSError:  # it has ended, or is another user's
        return False
