"""Judges samples in a reward process, and replaces the process when it crashes, stalls, or is past a deadline.

    judge(items) ──pending──▶ supervisor thread ──in flight──▶ reward process (workers/reward/process.py)
          ◀──verdicts, or items to be retried──┘

Reward functions run outside the actor, because only a process can be stopped in every case.
"""

import time
from typing import Any

from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.processes.handle import ProcessHandle
from workers.processes.supervisor import SILENCE_LIMIT_S, Cause, ProcessSupervisor
from workers.reward.sample_queue import JudgeResult, RewardItem, SampleQueue


class RewardRunner(ProcessSupervisor):
    """One reward process and its spare. `judge` may be called by several threads."""

    module, name = "workers.reward.process", "reward"

    def __init__(self, settings: RewardSettings):
        self.samples = SampleQueue()
        super().__init__(settings)

    def judge(self, items: list[RewardItem]) -> list[JudgeResult]:
        """Returns one verdict per item, or the item itself where it must be retried, here or in another process."""
        results = self.samples.add(items)
        self.poller.wake()
        if self.ended:
            self.fail_all()
        return [result.result() for result in results]

    # --- the supervisor thread ---------------------------------------------------------------------------------------

    def send_work(self) -> None:
        """Sends the pending samples if the process's main thread is free to take them."""
        assert self.process is not None
        if not (self.samples.pending and self.process.idle):
            return
        if not self.has_work():
            self.start_spare()  # not earlier: when a run starts, others need the cores
        if items := self.samples.send_pending():
            self.process.idle = False
            self.last_message = time.monotonic()
            self.process.send(items)

    def has_work(self) -> bool:
        return self.samples.sent_count > 0

    def next_deadline(self) -> float | None:
        if deadlines := self.samples.deadlines:
            return min(deadline.at for deadline in deadlines.values())
        return self.last_message + SILENCE_LIMIT_S if self.samples.in_flight else None

    def on_message(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        """Handles one message; workers/reward/process.py lists them."""
        if "running" in message:
            self.samples.start(message["running"], message["seconds"], in_loop=message["where"] == "loop")
        elif "verdict" in message:
            self.samples.finish(message.pop("verdict"), Verdict(**message))
        elif "idle" in message:
            process.idle = True

    def replace_overdue(self, now: float) -> None:
        deadlines = self.samples.deadlines
        if any(deadline.at <= now for deadline in deadlines.values()):
            self.replace_process("timeout")
        elif self.samples.in_flight and not deadlines and now > self.last_message + SILENCE_LIMIT_S:
            self.samples.suspect_all()
            self.replace_process("crash")

    def hand_back(self, cause: Cause, now: float, exit_status: str) -> None:
        self.samples.hand_back(cause, now, exit_status)

    def fail_work(self, error: Exception) -> None:
        self.samples.fail_all(error)
