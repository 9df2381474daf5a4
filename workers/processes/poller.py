"""Waits for processes and for other threads at the same time."""

import contextlib
import selectors
import socket
from collections.abc import Sequence

from workers.processes.handle import ProcessHandle


class Poller:
    """`wait` returns early when another thread calls `wake`."""

    def __init__(self) -> None:
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the socket is full of wake-ups, or closed
            self.sender.send(b".")

    def wait(self, processes: Sequence[ProcessHandle], timeout_s: float) -> list[ProcessHandle]:
        """Returns the processes that have sent something, or that can take more of what is unsent."""
        with selectors.PollSelector() as selector:
            selector.register(self.receiver, selectors.EVENT_READ)
            for process in processes:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
                selector.register(process.socket, events, process)
            keys = [key for key, _ in selector.select(timeout_s)]
        if any(key.fileobj is self.receiver for key in keys):
            self.receiver.recv(4096)
        return [key.data for key in keys if key.data]

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
