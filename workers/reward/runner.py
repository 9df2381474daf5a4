"""Judges samples in a reward process, and replaces the process when it crashes, stalls, or is past a deadline.

    judge(items) ──pending──▶ supervisor thread ──in flight──▶ reward process (workers/reward/process.py)
          ◀──verdicts, or items to be retried──┘

Reward functions run outside the actor because only a process can be stopped for certain. A spare process stands by with
its imports done, so that a replacement costs no waiting.
"""

import threading
import time
from concurrent.futures import Future
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.reward.poller import Poller
from workers.reward.process_handle import ProcessHandle
from workers.reward.sample_queue import Cause, JudgeResult, RewardItem, SampleQueue

SILENCE_LIMIT_S = (
    30.0  # a process that has samples, and none of them running, has stalled after this time without a message
)
MAX_FAILED_STARTS = 3  # in a row, where a retry makes sense


class RewardRunner:
    """One reward process and its spare. `judge` may be called by several threads."""

    def __init__(self, settings: RewardSettings):
        self.settings = settings
        self.samples = SampleQueue()
        self.ready: Future[dict[str, Any]] = Future()  # what the process reports when its functions are imported
        self.error: ConfigError | None = None  # why nothing can be judged any more
        self.closing = self.ended = False
        self.failed_starts = 0  # in a row
        self.last_message = 0.0
        self.process: ProcessHandle | None = None
        self.spare: ProcessHandle | None = None
        self.poller = Poller()
        self.supervisor = threading.Thread(target=self.supervise, daemon=True, name="reward-supervisor")
        self.supervisor.start()

    def judge(self, items: list[RewardItem]) -> list[JudgeResult]:
        """Returns one verdict per item, or the item itself where it must be retried, here or in another process."""
        results = self.samples.add(items)
        self.poller.wake()
        if self.ended:
            self.fail_all()
        return [result.result() for result in results]

    def close(self) -> None:
        self.closing = True
        self.poller.wake()
        self.supervisor.join()

    # --- the supervisor thread ---------------------------------------------------------------------------------------

    def supervise(self) -> None:
        try:
            self.process = ProcessHandle(self.settings)
            while not self.closing and self.error is None:
                self.send_pending()
                ready = self.poller.wait(self.processes(), self.seconds_to_deadline())
                for process in self.processes():
                    if process in ready:
                        process.flush()
                        self.read_from(process)
                self.replace_stalled()
        except BaseException as error:  # never leave a caller waiting
            self.error = ConfigError(f"the reward runner failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.ended = True
            try:
                for process in self.processes():
                    process.kill()
            finally:
                self.fail_all()
                self.poller.close()

    def processes(self) -> list[ProcessHandle]:
        return [p for p in (self.process, self.spare) if p]

    def send_pending(self) -> None:
        """Sends the pending samples if the process's main thread is free to take them."""
        if not (self.samples.pending and self.process and self.process.ready_info and self.process.idle):
            return
        if not self.samples.sent_count:
            self.start_spare()  # not earlier: when a run starts, others need the cores
        if items := self.samples.send_pending():
            self.process.idle = False
            self.last_message = time.monotonic()
            self.process.send(items)

    def seconds_to_deadline(self) -> float:
        deadlines = self.samples.deadlines
        due = [deadline.at for deadline in deadlines.values()]
        due += [p.started_at + self.settings.start_timeout_s for p in self.processes() if p.ready_info is None]
        if self.samples.in_flight and not deadlines:
            due.append(self.last_message + SILENCE_LIMIT_S)
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
        """Handles one message; workers/reward/process.py lists them."""
        self.last_message = time.monotonic()
        if "problem" in message:
            self.handle_failed_start(process, message["problem"])
        elif "ready" in message:
            self.handle_ready(process, message)
        elif "running" in message:
            self.samples.start(message["running"], message["seconds"], message["where"])
        elif "verdict" in message:
            self.samples.finish(message.pop("verdict"), Verdict(**message))
        elif "idle" in message:
            process.idle = True
        elif "retire" in message:
            print(f"reward process replaced: {message['retire']}", flush=True)
            self.replace_process("retired")

    def handle_ready(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        process.ready_info, process.idle = message, True
        if process is self.process and not self.ready.done():
            self.ready.set_result(message)
        self.failed_starts = 0
        if self.samples.sent_count:
            self.start_spare()

    def handle_failed_start(self, process: ProcessHandle, problem: str = "") -> None:
        """Retries the start if it has worked before, or if the import ended the process (no `problem`)."""
        exit_status = process.kill()
        sentence = problem or f"{describe_functions(self.settings)}: importing ended the process ({exit_status})."
        sentence = sentence.encode(errors="replace").decode()
        print(f"reward process did not start: {sentence}", flush=True)
        if process is self.spare:
            self.spare = None
            return
        self.failed_starts += 1
        if (problem and not self.ready.done()) or self.failed_starts >= MAX_FAILED_STARTS:
            self.error = ConfigError(sentence)
        else:
            self.process = ProcessHandle(self.settings)

    def replace_stalled(self) -> None:
        """Replaces a process that is past the deadline of its import or of a sample, or silent for too long."""
        now, limit_s = time.monotonic(), self.settings.start_timeout_s
        for process in self.processes():
            if process.ready_info is None and now > process.started_at + limit_s:
                problem = f"{describe_functions(self.settings)}: importing took more than {limit_s:g} s."
                self.handle_failed_start(process, problem)
        deadlines = self.samples.deadlines
        if any(deadline.at <= now for deadline in deadlines.values()):
            self.replace_process("timeout")
        elif self.samples.in_flight and not deadlines and now > self.last_message + SILENCE_LIMIT_S:
            self.samples.suspect_all()
            self.replace_process("crash")

    def replace_process(self, cause: Cause) -> None:
        """Kills the process, hands its samples back, and goes on with the spare process."""
        assert self.process is not None
        now = time.monotonic()
        self.samples.hand_back(cause, now, exit_status=self.process.kill())
        self.process, self.spare = self.spare or ProcessHandle(self.settings), None
        if self.process.ready_info:
            self.start_spare()

    def start_spare(self) -> None:
        if self.spare is None and self.settings.keep_spare:
            self.spare = ProcessHandle(self.settings)

    def fail_all(self) -> None:
        """Raises the error in every caller that still waits."""
        error = self.error or ConfigError("the reward runner was closed")
        if not self.ready.done():
            self.ready.set_exception(error)
        self.samples.fail_all(error)


def describe_functions(settings: RewardSettings) -> str:
    names = {f.function for functions in settings.functions.values() for f in functions.values()}
    return f"reward.functions ({', '.join(sorted(names))})"
