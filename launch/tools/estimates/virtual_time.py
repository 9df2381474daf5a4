"""A clock for simulations: threads run one at a time, and time passes only while all of them wait for it.

    time = VirtualTime()
    time.run(main)         main, and what it starts, may call time.sleep(3.5) and wait for futures, locks and queues
    time.after(2.0, call)  simulated machines need no thread: whichever thread waits makes their calls

`VirtualTime` implements `rlsys.threads.Threads`, so code written for threads runs unchanged and as fast as it computes: an
hour takes no longer than a second. Events at the same moment happen in the order in which they were scheduled, or in an
order that a seed draws; then locks also let other threads go first. Either way runs are repeatable.
"""

import heapq
import itertools
import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Waiter:
    """A thread of a simulation."""

    def __init__(self, name: str = "main") -> None:
        self.name, self.gate, self.turn = name, threading.Lock(), 0  # turn: how often it has been woken
        self.gate.acquire()
        self.thread: threading.Thread | None = None


class VirtualTime:
    def __init__(self, seed: int | str | None = None, limit_s: float = math.inf):
        self.seconds, self.limit_s = 0.0, limit_s
        self.draw: Callable[[], float] = (lambda: 0.0) if seed is None else random.Random(seed).random
        self.seeded = seed is not None
        # time, draw, order, and a call, or a thread with the turn that it waits for
        self.schedule: list[tuple[float, float, int, Callable[[], None] | None, Waiter | None, int]] = []
        self.order = itertools.count()
        self.main = self.current = Waiter()
        self.threads: list[Waiter] = []
        self.ended, self.events = False, 0
        self.error: BaseException | None = None

    # --- what drives it -------------------------------------------------------------------------------------------------

    def run(self, main: Callable[[], T]) -> T:
        """Runs `main` and returns its result. Threads that are still running then are ended."""
        try:
            return main()
        finally:
            self.ended = True
            for waiter in self.threads:  # one after the other: no two ever run at once
                if waiter.thread and waiter.thread.is_alive():
                    self.current = waiter
                    waiter.gate.release()
                    waiter.thread.join()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Makes a call later, which must not wait."""
        heapq.heappush(self.schedule, (self.seconds + max(seconds, 0.0), self.draw(), next(self.order), call, None, 0))

    def wake(self, waiter: Waiter, seconds: float = 0.0) -> None:
        """Wakes a thread later, unless something else has woken it by then."""
        entry = self.seconds + max(seconds, 0.0), self.draw(), next(self.order), None, waiter, waiter.turn
        heapq.heappush(self.schedule, entry)

    def sleep(self, seconds: float) -> None:
        self.wake(self.current, seconds)
        self.wait_for_turn()

    def wait(self, among: list[tuple[Waiter, int]], seconds: float | None = None) -> None:
        """Waits until `wake_all(among)`, at most so long."""
        among.append((self.current, self.current.turn))
        if seconds is not None:
            self.wake(self.current, seconds)
        self.wait_for_turn()

    def wake_all(self, among: list[tuple[Waiter, int]]) -> None:
        for waiter, turn in among:
            if waiter.turn == turn:  # else its time was over before
                self.wake(waiter)
        among.clear()

    def yield_turn(self) -> None:
        """Marks a moment at which a real thread might be interrupted."""
        if self.seeded and self.threads and not self.ended:
            self.sleep(0.0)

    def wait_for_turn(self) -> None:
        """Lets others run until this thread is woken."""
        me = self.current
        if self.ended:
            raise SimulationEnded
        following = self.next_thread()
        if following is not me:
            self.current = following
            following.gate.release()
            me.gate.acquire()
            if self.ended:
                raise SimulationEnded
        if me is self.main and self.error:
            raise self.error

    def next_thread(self) -> Waiter:
        """Makes the calls that are due before the next thread is. Returns the thread. After an error that is main."""
        try:
            while self.schedule and not self.error:
                at, _, _, call, waiter, turn = heapq.heappop(self.schedule)
                if waiter and waiter.turn != turn:
                    continue
                if at > self.limit_s:
                    raise EndlessWait(f"simulation: more than {self.limit_s:g} s have passed.")
                self.seconds = at
                self.events += 1
                if waiter:
                    waiter.turn += 1
                    return waiter
                assert call
                call()
            if not self.error:
                raise EndlessWait("simulation: all threads wait for each other.")
        except BaseException as error:
            self.error = error
        self.main.turn += 1
        return self.main

    def submit(self, work: Callable[[], T], name: str = "work") -> "VirtualFuture[T]":
        """Starts `work` on a thread of its own."""
        future: VirtualFuture[T] = VirtualFuture(self)
        waiter = Waiter(name)
        waiter.thread = threading.Thread(target=self.run_thread, args=(waiter, future, work), daemon=True, name=name)
        self.threads = [w for w in self.threads if w.thread and w.thread.is_alive()] + [waiter]
        waiter.thread.start()
        self.wake(waiter)
        return future

    def run_thread(self, waiter: Waiter, future: "VirtualFuture[T]", work: Callable[[], T]) -> None:
        waiter.gate.acquire()
        if self.ended:
            return
        settle(future, work)
        if not self.ended:
            self.current = self.next_thread()
            self.current.gate.release()

    # --- `Threads` ------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.seconds

    def start(self, work: Callable[[], None], name: str) -> None:
        self.submit(work, name)

    def executor(self, name: str) -> "SerialExecutor":
        return SerialExecutor(self, name)

    def lock(self) -> "VirtualLock":
        return VirtualLock(self)

    def queue(self) -> "VirtualQueue":
        return VirtualQueue(self)

    def future(self) -> "VirtualFuture[Any]":
        return VirtualFuture(self)


class EndlessWait(RuntimeError):
    """Nothing will ever happen again, or too much time has passed."""


class SimulationEnded(BaseException):
    """Ends a thread that still waits when the simulation is over."""


class VirtualFuture(Future[T]):
    """A future whose waiters wait in virtual time."""

    def __init__(self, time: VirtualTime):
        super().__init__()
        self.time = time

    def wait(self, timeout: float | None = None) -> None:
        if self.done():
            return
        waiters: list[tuple[Waiter, int]] = []
        self.add_done_callback(lambda _: self.time.wake_all(waiters))
        self.time.wait(waiters, timeout)
        if not self.done():
            raise TimeoutError

    def result(self, timeout: float | None = None) -> T:
        self.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wait(timeout)
        return super().exception(0)


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Does the work, unless the future was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except SimulationEnded:
        return
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class VirtualLock:
    """A lock that its own thread may take again."""

    def __init__(self, time: VirtualTime):
        self.time, self.count = time, 0
        self.owner: Waiter | None = None
        self.waiters: list[tuple[Waiter, int]] = []

    def acquire(self, blocking: bool = True) -> bool:
        self.time.yield_turn()
        while self.owner not in (None, self.time.current):
            if not blocking:
                return False
            self.time.wait(self.waiters)
        self.owner = self.time.current
        self.count += 1
        return True

    def release(self) -> None:
        self.count -= 1
        if not self.count:
            self.owner = None
            self.time.wake_all(self.waiters)
            self.time.yield_turn()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VirtualQueue:
    def __init__(self, time: VirtualTime):
        self.time = time
        self.items: deque[Any] = deque()
        self.waiters: list[tuple[Waiter, int]] = []

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.time.wake_all(self.waiters)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = None if timeout is None else self.time.seconds + timeout
        while not self.items:
            left = None if until is None else until - self.time.seconds
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self.time.wait(self.waiters, left)
        return self.items.popleft()

    def empty(self) -> bool:
        return not self.items


class SerialExecutor(Executor):
    """One thread in virtual time, which runs its tasks in order."""

    def __init__(self, time: VirtualTime, name: str = "serial"):
        self.time, self.name = time, name
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.last: VirtualFuture[None] | None = None  # of the thread that runs them; it ends when none is left

    def submit(self, work: Callable[..., T], /, *arguments: Any, **options: Any) -> "VirtualFuture[T]":
        future: VirtualFuture[T] = VirtualFuture(self.time)
        self.tasks.append((future, lambda: work(*arguments, **options)))
        if self.last is None or self.last.done():
            self.last = self.time.submit(self.run_tasks, self.name)
        return future

    def run_tasks(self) -> None:
        while self.tasks and not self.time.ended:
            settle(*self.tasks.popleft())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for what is running, if asked to. `VirtualTime.run` ends the threads."""
        if cancel_futures:
            for future, _ in self.tasks:
                future.cancel()
        if wait and self.last:
            self.last.exception()
