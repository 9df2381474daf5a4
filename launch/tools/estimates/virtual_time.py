"""A clock for simulations: threads run one at a time, and time passes only while all of them wait for it.

    time = VirtualTime()
    time.run(main)         main, and what it submits, may call time.sleep(3.5) and wait for the submitted futures

Code written for threads and futures runs unchanged and as fast as it computes: an hour takes no longer than a second.
Events at the same moment happen in the order in which they were scheduled, so runs are repeatable.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.schedule: list[tuple[float, int, threading.Semaphore]] = []  # time, order, gate of the thread to run
        self.order = itertools.count()
        self.thread_local = threading.local()  # gate: the semaphore that the thread waits at
        self.ended = False
        self.waiting: set[threading.Semaphore] = set()

    def run(self, main: Callable[[], T]) -> T:
        """Runs `main` and returns its result. Threads that are still running then are ended."""
        self.thread_local.gate = threading.Semaphore(0)
        try:
            return main()
        finally:
            self.ended = True
            for gate in {*self.waiting, *(gate for _, _, gate in self.schedule)}:
                gate.release()

    def sleep(self, seconds: float) -> None:
        self.wake_after(self.thread_local.gate, seconds)
        self.wait_for_turn()

    def submit(self, work: Callable[[], T]) -> "VirtualFuture[T]":
        """Starts `work` in a thread of its own."""
        future: VirtualFuture[T] = VirtualFuture(self)
        gate = threading.Semaphore(0)
        threading.Thread(target=self.run_thread, args=(gate, future, work), daemon=True).start()
        self.wake_after(gate)
        return future

    def run_thread(self, gate: threading.Semaphore, future: "VirtualFuture[T]", work: Callable[[], T]) -> None:
        gate.acquire()
        self.thread_local.gate = gate
        try:
            if not self.ended:
                future.set_result(work())
        except SimulationEnded:
            return
        except BaseException as error:
            future.set_exception(error)
        if not self.ended:
            self.run_next()

    def wake_after(self, gate: threading.Semaphore, seconds: float = 0.0) -> None:
        heapq.heappush(self.schedule, (self.now + max(seconds, 0.0), next(self.order), gate))

    def wait_for_turn(self) -> None:
        """Lets other threads run until this one is woken."""
        gate = self.thread_local.gate
        self.waiting.add(gate)
        self.run_next()
        gate.acquire()
        self.waiting.discard(gate)
        if self.ended:
            raise SimulationEnded

    def run_next(self) -> None:
        if not self.schedule:
            raise RuntimeError("simulation: all threads wait for each other.")
        self.now, _, gate = heapq.heappop(self.schedule)
        gate.release()


class SimulationEnded(BaseException):
    """Ends a thread that still waits when the simulation is over."""


class VirtualFuture(Future[T]):
    """A future whose waiters wait in virtual time."""

    def __init__(self, time: VirtualTime):
        super().__init__()
        self.time = time

    def wait(self) -> None:
        if not self.done():
            gate = self.time.thread_local.gate
            self.add_done_callback(lambda _: self.time.wake_after(gate))
            self.time.wait_for_turn()

    def result(self, timeout: float | None = None) -> T:
        self.wait()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wait()
        return super().exception(0)


class SerialExecutor(Executor):
    """A pool of one thread in virtual time, which runs its tasks in order."""

    def __init__(self, time: VirtualTime):
        self.time = time
        self.last: VirtualFuture[Any] | None = None

    def submit(self, work: Callable[..., T], /, *arguments: Any, **options: Any) -> "VirtualFuture[T]":
        previous = self.last

        def run_after_previous() -> T:
            if previous:
                previous.wait()
            return work(*arguments, **options)

        self.last = future = self.time.submit(run_after_previous)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: `VirtualTime.run` ends the threads."""
