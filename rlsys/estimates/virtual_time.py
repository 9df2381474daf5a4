"""A clock for simulations: threads run one at a time, and time passes only when all of them wait for it.

    time = VirtualTime()
    time.run(main)         main and what it submits call time.sleep(3.5), and future.result() of what was submitted

Code that is written for threads and futures runs unchanged, as fast as its computations go: a step of an hour takes no longer
than one of a second. What happens at the same moment happens in the order in which it was asked for, so runs are repeatable.
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
        self.schedule: list[tuple[float, int, threading.Semaphore]] = []  # who goes on when
        self.order = itertools.count()
        self.thread_local = threading.local()  # the semaphore that a thread waits at
        self.ended = False
        self.waiting: set[threading.Semaphore] = set()

    def run(self, main: Callable[[], T]) -> T:
        """The result of `main`, when it is there; whatever else goes on is ended then."""
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
        """Begins something that goes on beside."""
        future: VirtualFuture[T] = VirtualFuture(self)
        gate = threading.Semaphore(0)

        def thread() -> None:
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

        threading.Thread(target=thread, daemon=True).start()
        self.wake_after(gate)
        return future

    def wake_after(self, gate: threading.Semaphore, seconds: float = 0.0) -> None:
        heapq.heappush(self.schedule, (self.now + max(seconds, 0.0), next(self.order), gate))

    def wait_for_turn(self) -> None:
        """Lets others go on until it is this thread's turn again."""
        gate = self.thread_local.gate
        self.waiting.add(gate)
        self.run_next()
        gate.acquire()
        self.waiting.discard(gate)
        if self.ended:
            raise SimulationEnded

    def run_next(self) -> None:
        if not self.schedule:
            raise RuntimeError("simulation: all wait for each other.")
        self.now, _, gate = heapq.heappop(self.schedule)
        gate.release()


class SimulationEnded(BaseException):
    """The simulation is over; what still waits in it is given up."""


class VirtualFuture(Future[T]):
    """A future that is waited for in virtual time."""

    def __init__(self, time: VirtualTime):
        super().__init__()
        self.time = time

    def wait(self) -> None:
        """Waits until it is done."""
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
    """A pool of one thread, in virtual time: what is submitted is done in order."""

    def __init__(self, time: VirtualTime):
        self.time = time
        self.last: VirtualFuture[Any] | None = None

    def submit(self, work: Callable[..., T], /, *arguments: Any, **options: Any) -> "VirtualFuture[T]":
        before = self.last

        def then() -> T:
            if before:
                before.wait()
            return work(*arguments, **options)

        self.last = future = self.time.submit(then)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to end: `VirtualTime.run` does it."""
