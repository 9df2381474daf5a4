"""Ends all that a program has started, wherever it has put it: every process has the program's mark in its environment."""

import os
import signal
import time

KILL_TIMEOUT_S = 5.0  # for the kernel to end killed processes


def kill_marked(mark: bytes) -> None:
    """Kills the processes with a mark, such as b"NAME=abc", even in sessions and process groups of their own."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while sum(kill_if_marked(int(name), mark) for name in os.listdir("/proc") if name.isdigit()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)  # until they are gone; the next round finds what they have started meanwhile


def kill_if_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark not in file.read().split(b"\0"):
                return False
        os.kill(pid, signal.SIGKILL)
        return True
    except OSError:  # it has ended, or is another user's
        return False
