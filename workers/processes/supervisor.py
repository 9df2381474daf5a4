"""Keeps one process for a user's functions alive: replaces it when it crashes, stalls, or is past a deadline.

A spare process has already imported the functions, so that a replacement costs no waiting.
"""

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, Protocol

from rlsys.errors import ConfigError
from workers.processes.handle import ProcessHandle
from workers.processes.poller import Poller

SILENCE_LIMIT_S = 30.0  # a process that has work, but has not begun it, has stalled after this time without a message
MAX_FAILED_STARTS = 3  # in a row, if a retry makes sense at all

Cause = Literal["timeout", "crash", "retired"]  # why a process ends; "retired": it asked to be replaced


class ProcessSettings(Protocol):
    """Settings of a process; they are sent to it."""

    @property
    def memory_mb(self) -> int: ...  # 0: no limit
    @property
    def start_timeout_s(self) -> float: ...  # for importing the functions
    @property
    def keep_spare(self) -> bool: ...
    @property
    def description(self) -> str: ...  # the option that names the functions, and the functions


class ProcessSupervisor(ABC):
    """One process and its spare, managed by one thread. A subclass gives the process work, and reads its messages."""

    module: ClassVar[str]  # what the process runs
    name: ClassVar[str]  # what it is called
    gathering_s: ClassVar[float] = (
        0.0  # for which a message waits for others, because each wake-up of the thread costs time
    )

    def __init__(self, settings: ProcessSettings):
        self.settings = settings
        self.ready: Future[dict[str, Any]] = Future()  # what the process reports when its functions are imported
        self.error: ConfigError | None = None  # why no work can be done any more
        self.closing = self.ended = False
        self.failed_starts = 0  # in a row
        self.last_message = 0.0
        self.process: ProcessHandle | None = None
        self.spare: ProcessHandle | None = None
        self.poller = Poller()
        self.thread = threading.Thread(target=self.supervise, daemon=True, name=f"{self.name}-supervisor")
        self.thread.start()

    def close(self) -> None:
        self.closing = True
        self.poller.wake()
        self.thread.join()

    # --- what a subclass does ----------------------------------------------------------------------------------------

    @abstractmethod
    def send_work(self) -> None:
        """Sends what is pending, if the process can take it."""

    @abstractmethod
    def has_work(self) -> bool:
        """Returns whether the process has been given work. Before, it needs no spare."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of the running work, by `time.monotonic`; None if nothing has a deadline."""

    @abstractmethod
    def replace_overdue(self, now: float) -> None:
        """Replaces the process if work is past its deadline."""

    @abstractmethod
    def on_message(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        """Handles a message of the process about its work."""

    @abstractmethod
    def hand_back(self, cause: Cause, now: float, exit_status: str) -> None:
        """Answers or retries all work of a process that has ended."""

    @abstractmethod
    def fail_work(self, error: Exception) -> None:
        """Raises the error in every caller that still waits."""

    # --- the supervisor thread ---------------------------------------------------------------------------------------

    def supervise(self) -> None:
        try:
            self.process = self.start_process()
            while not self.closing and self.error is None:
                if self.process and self.process.ready_info:
                    self.send_work()
                ready = self.poller.wait(self.processes(), self.seconds_to_deadline())
                time.sleep(self.gathering_s)
                for process in self.processes():
                    if process in ready:
                        process.flush()
                        self.read_from(process)
                self.replace_overdue_starts()
                self.replace_overdue(time.monotonic())
        except BaseException as error:  # never leave a caller waiting
            self.error = ConfigError(f"the {self.name} runner failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.ended = True
            try:
                for process in self.processes():
                    process.kill()
            finally:
                self.fail_all()
                self.poller.close()

    def start_process(self) -> ProcessHandle:
        return ProcessHandle(self.module, self.settings)

    def processes(self) -> list[ProcessHandle]:
        return [p for p in (self.process, self.spare) if p]

    def seconds_to_deadline(self) -> float:
        due = [p.started_at + self.settings.start_timeout_s for p in self.processes() if p.ready_info is None]
        if (deadline := self.next_deadline()) is not None:
            due.append(deadline)
        return max(0.0, min(due) - time.monotonic()) if due else SILENCE_LIMIT_S

    def read_from(self, process: ProcessHandle) -> None:
        try:
            for message in process.read_messages():
                self.handle_message(process, message)
                if self.error or process not in self.processes():
                    return
        except (OSError, ValueError, KeyError, TypeError):  # it has died, or a user's function wrote to the socket
            process.closed = True
        if process.closed and process.ready_info is None:
            self.handle_failed_start(process)
        elif process.closed and process is self.spare:
            self.spare = None
            process.kill()
        elif process.closed:
            self.replace_process("crash")

    def handle_message(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        self.last_message = time.monotonic()
        if "problem" in message:
            self.handle_failed_start(process, message["problem"])
        elif "ready" in message:
            self.handle_ready(process, message)
        elif "retire" in message:
            print(f"{self.name} process replaced: {message['retire']}", flush=True)
            self.replace_process("retired")
        else:
            self.on_message(process, message)

    def handle_ready(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        process.ready_info, process.idle = message, True
        if process is self.process and not self.ready.done():
            self.ready.set_result(message)
        self.failed_starts = 0
        if self.has_work():
            self.start_spare()

    def handle_failed_start(self, process: ProcessHandle, problem: str = "") -> None:
        """Retries the start if it has worked before, or if the import ended the process (no `problem`)."""
        exit_status = process.kill()
        sentence = problem or f"{self.settings.description}: importing ended the process ({exit_status})."
        sentence = sentence.encode(errors="replace").decode()
        print(f"{self.name} process did not start: {sentence}", flush=True)
        if process is self.spare:
            self.spare = None
            return
        self.failed_starts += 1
        if (problem and not self.ready.done()) or self.failed_starts >= MAX_FAILED_STARTS:
            self.error = ConfigError(sentence)
        else:
            self.process = self.start_process()

    def replace_overdue_starts(self) -> None:
        """Replaces a process that is past the deadline of its import."""
        now, limit_s = time.monotonic(), self.settings.start_timeout_s
        for process in self.processes():
            if process.ready_info is None and now > process.started_at + limit_s:
                problem = f"{self.settings.description}: importing took more than {limit_s:g} s."
                self.handle_failed_start(process, problem)

    def replace_process(self, cause: Cause) -> None:
        """Kills the process, hands its work back, and goes on with the spare process."""
        assert self.process is not None
        now = time.monotonic()
        self.hand_back(cause, now, exit_status=self.process.kill())
        self.process, self.spare = self.spare or self.start_process(), None
        if self.process.ready_info:
            self.start_spare()

    def start_spare(self) -> None:
        if self.spare is None and self.settings.keep_spare:
            self.spare = self.start_process()

    def fail_all(self) -> None:
        """Raises the error in every caller that still waits."""
        error = self.error or ConfigError(f"the {self.name} runner was closed")
        if not self.ready.done():
            self.ready.set_exception(error)
        self.fail_work(error)
