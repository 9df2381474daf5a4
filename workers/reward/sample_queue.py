"""The samples of a reward runner: pending, then in flight in the process, then judged or handed back for a retry."""

import contextlib
import pickle
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlsys.types import Verdict
from workers.processes.handle import KILLED
from workers.processes.supervisor import Cause

MAX_KILLED = 5  # processes, while a sample is judged; then it has failed


@dataclass
class RewardItem:
    """A sample to be judged. `RewardItem("", {"completion": "42", "answer": "42"})`"""

    function_set: str  # whose reward functions judge it: those of a data set, or "" for reward.functions
    inputs: dict[str, Any]  # what functions may ask for, by name
    alone: bool = False  # judge it with no other sample at the same time: it may be the one that ends processes
    killed: int = 0  # processes that were killed while it was judged
    uid: str = ""  # of its prompt, for errors


JudgeResult = Verdict | RewardItem  # an item comes back unjudged when another sample ended the process


class Deadline(NamedTuple):
    at: float
    seconds: float


class SampleQueue:
    """`add` may be called by any thread, everything else by the runner's."""

    def __init__(self) -> None:
        self.pending: deque[tuple[RewardItem, Future[JudgeResult]]] = deque()
        self.in_flight: dict[int, tuple[RewardItem, Future[JudgeResult]]] = {}  # by number
        self.sent_count = 0  # samples sent so far, which numbers them
        # Deadlines of running samples. The main thread judges one list at a time, the event loop many samples together.
        self.thread: dict[int, Deadline] = {}
        self.loop: dict[int, Deadline] = {}

    @property
    def deadlines(self) -> dict[int, Deadline]:
        return self.thread | self.loop

    def add(self, items: list[RewardItem]) -> list[Future[JudgeResult]]:
        futures: list[Future[JudgeResult]] = [Future() for _ in items]
        self.pending.extend(zip(items, futures, strict=True))
        return futures

    def send_pending(self) -> list[tuple[int, str, bytes]]:
        """Moves pending samples in flight, and returns them as (number, function set, pickled inputs)."""
        sent = []
        while self.pending:
            item, future = self.pending[0]
            if self.in_flight and (item.alone or next(iter(self.in_flight.values()))[0].alone):
                break
            self.pending.popleft()
            try:
                inputs = pickle.dumps(item.inputs)
            except Exception as error:  # a row may hold anything
                detail = f"the sample cannot be sent to a reward process: {type(error).__name__}: {error}"
                future.set_result(Verdict(None, failure="exception", detail=detail))
                continue
            self.sent_count += 1
            self.in_flight[self.sent_count] = item, future
            sent.append((self.sent_count, item.function_set, inputs))
        return sent

    def start(self, numbers: list[int], seconds: float, in_loop: bool) -> None:
        """Starts the deadline of samples that run from now on, in the main thread or in the event loop."""
        started = dict.fromkeys(numbers, Deadline(time.monotonic() + seconds, seconds))
        if in_loop:
            self.loop |= started
        else:
            self.thread = started

    def finish(self, number: int, verdict: Verdict) -> None:
        self.thread.pop(number, None)
        self.loop.pop(number, None)
        _, future = self.in_flight.pop(number)
        future.set_result(verdict)

    def suspect_all(self) -> None:
        """Counts every sample as running: any of them may be what the process hangs in."""
        self.thread = dict.fromkeys(self.in_flight, Deadline(time.monotonic(), 0.0))

    def hand_back(self, cause: Cause, now: float, exit_status: str) -> None:
        """Answers all samples of a process that has ended.

        A suspect is a running sample that may be the cause. If it ran alone, it has failed. If it did not, it is handed
        back to be judged alone, which shows whether it was the cause. So it is if the process was killed, which others may
        have done, but not without end. All others are handed back to be retried.
        """
        deadlines = self.deadlines if cause != "retired" else {}
        suspects = [n for n, deadline in deadlines.items() if cause == "crash" or deadline.at <= now]
        for number, (item, future) in self.in_flight.items():
            if number not in suspects:
                future.set_result(item)
            elif exit_status == KILLED and cause == "crash" and item.killed + 1 < MAX_KILLED:
                future.set_result(replace(item, alone=True, killed=item.killed + 1))
            elif not item.alone and (len(suspects) > 1 or cause == "crash" or self.may_be_blocked(number)):
                future.set_result(replace(item, alone=True))
            elif cause == "timeout":
                future.set_result(timeout_verdict(deadlines[number].seconds))
            else:
                detail = f"the reward process ended: {exit_status}"
                future.set_result(Verdict(None, failure="crash", detail=detail))
        self.in_flight, self.thread, self.loop = {}, {}, {}

    def may_be_blocked(self, number: int) -> bool:
        """Returns whether another sample may block this one's event loop: a blocking sample cannot say that it runs."""
        return number in self.loop and len(self.in_flight) > 1

    def fail_all(self, error: Exception) -> None:
        for _, future in self.in_flight.values():
            if not future.done():
                future.set_exception(error)
        with contextlib.suppress(IndexError):
            while True:
                _, future = self.pending.popleft()
                future.set_exception(error)


def timeout_verdict(seconds: float) -> Verdict:
    detail = f"no verdict after {seconds:g} s (reward.timeout_s, or its deadline_s); process killed"
    return Verdict(None, failure="timeout", detail=detail)
