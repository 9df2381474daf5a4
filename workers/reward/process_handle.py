"""A reward process as its runner sees it: what is said to it and by it without waiting, and an end for all that it started."""

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

from rlsys.rewards.settings import RewardSettings

KILL_TIMEOUT_S = 5.0  # for the kernel to end what is killed
ENV_MARK = "RLSYS_REWARD_PROCESS"  # in the environment of a process and of all that it starts


class ProcessHandle:
    """A process and what is said to it and by it. `facts` are there when its functions are imported.

    Neither end waits for the other here: a process that hangs in the middle of a message must not hold up the keeper.
    """

    def __init__(self, settings: RewardSettings):
        self.socket, theirs = socket.socketpair()
        self.mark = uuid.uuid4().hex
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "workers.reward.process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts can be killed with it
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"}
                | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), ENV_MARK: self.mark},
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.socket.setblocking(False)
        self.unsent, self.unread = bytearray(), bytearray()
        self.closed = False  # it has closed its end
        self.started_at = time.monotonic()
        self.ready_info: dict[str, Any] | None = None  # what it said of itself when it was ready
        self.idle = False
        self.send(settings)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        # As a multiprocessing.Connection reads it.
        self.unsent += struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        """Sends as much as it takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has died: reading will say so
            self.unsent.clear()

    def read_messages(self) -> list[dict[str, Any]]:
        """The messages that have come whole."""
        try:
            while data := self.socket.recv(1 << 20):
                self.unread += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages = []
        while len(self.unread) >= 4:
            end = 4 + int.from_bytes(self.unread[:4], "big")
            if len(self.unread) < end:
                break
            messages.append(loads(bytes(self.unread[4:end])))
            del self.unread[:end]
        return messages

    def kill(self) -> str:
        """Kills it and all it started; returns how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        code = self.child.wait()
        self.socket.close()
        mark, until = f"{ENV_MARK}={self.mark}".encode(), time.monotonic() + KILL_TIMEOUT_S
        while sum(_killed(int(name), mark) for name in os.listdir("/proc") if name.isdigit()):
            if time.monotonic() > until:
                break
            time.sleep(0.001)  # until they are gone; what they have started meanwhile is found next
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _killed(pid: int, mark: bytes) -> bool:
    """Kills a process that has the mark, whatever group or parent it has made for itself."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark not in file.read().split(b"\0"):
                return False
        os.kill(pid, signal.SIGKILL)
        return True
    except OSError:  # it has ended, or is another user's
        return False
