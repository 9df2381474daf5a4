"""Threads, and the clock by which the driver decides: real ones, or those of a simulation.

What only measures may read any clock. What waits, or decides by the time, asks a `Threads`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol


class Lock(AbstractContextManager[Any], Protocol):
    """A lock that its own thread may take again."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class Queue(Protocol):
    def put(self, item: Any) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Raises `queue.Empty` after the timeout."""
        ...

    def empty(self) -> bool: ...


class Threads(Protocol):
    def now(self) -> float:
        """Seconds since any moment."""
        ...

    def start(self, work: Callable[[], None], name: str) -> None:
        """Runs `work` on a thread of its own, which nothing waits for."""
        ...

    def executor(self, name: str) -> Executor:
        """One thread that runs what it is given in order."""
        ...

    def lock(self) -> Lock: ...

    def queue(self) -> Queue: ...

    def future(self) -> Future[Any]: ...


class RealThreads:
    def now(self) -> float:
        return time.monotonic()

    def start(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def executor(self, name: str) -> Executor:
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def lock(self) -> Lock:
        return threading.RLock()

    def queue(self) -> Queue:
        return SimpleQueue[Any]()

    def future(self) -> Future[Any]:
        return Future()


REAL = RealThreads()
