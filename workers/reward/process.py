"""The process that runs reward functions. `workers.reward.runner` starts it, sends it samples and replaces it.

    runner ──pickle [(number, function set, pickled inputs), …]──▶ process
           ◀── {"ready": true, …}, or {"problem": sentence}   once, when the functions are imported
           ◀── {"running": [numbers], "seconds": s, "where": "thread"}   only these run in the main thread now
           ◀── {"running": [numbers], "seconds": s, "where": "loop"}     these run in the event loop, with others
               sent again, their deadline begins anew: they wait for an engine that is being replaced
           ◀── {"verdict": number, "score": …, …}
           ◀── {"idle": true}                                 its main thread is free: the next list may come
           ◀── {"retire": reason}                             it wants to be replaced; its other samples are retried

A deadline begins when a sample is reported as running. Plain functions run one sample after the other in the main
thread, so that a user's signals and event loops work. Async functions run in one event loop, in a second thread.
Answers are JSON: nothing that a user's function sends is unpickled.

Covered: the process ends with its runner; past a deadline it is killed with everything it started; `reward.memory_mb`
limits what it allocates. Not covered: files, network and environment are the user's. Do not run untrusted code in a
reward function, but in the sandbox that the built-in `code` uses.
"""

import asyncio
import dataclasses
import json
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rlsys.rewards.asking import Ask
from rlsys.rewards.functions import NOTES
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.processes.child import run_child

if TYPE_CHECKING:
    from rlsys.rewards import Judge

GRACE_S = 1.0  # for async functions to stop by themselves, before their process is killed
MAX_LEFT_THREADS = 32  # threads that functions may leave running before the process is replaced


class RewardServer:
    def __init__(self, connection: Connection, settings: RewardSettings):
        from rlsys.rewards import Judge

        self.connection, self.settings, self.lock = connection, settings, threading.Lock()
        self.pid = os.getpid()
        self.judges = {
            name: Judge(functions, timeout_s=settings.timeout_s, ask=Ask(settings.models) if settings.models else None)
            for name, functions in settings.functions.items()
        }
        self.batched = any(judge.batched for judge in self.judges.values())
        self.retire_reason = ""  # why it wants to be replaced
        self.async_pending = 0  # samples in the event loop
        self.loop: asyncio.AbstractEventLoop | None = None
        if any(judge.async_rewards for judge in self.judges.values()):
            self.loop = asyncio.new_event_loop()
            self.loop_slots = asyncio.Semaphore(max(1, settings.concurrency // self.batch_size))
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.initial_threads = threading.active_count()

    @property
    def batch_size(self) -> int:
        return self.settings.batch if self.batched else 1

    def send(self, **message: Any) -> None:
        if os.getpid() != self.pid:  # a function has forked, and its child came back from it
            os._exit(0)
        with self.lock:
            self.connection.send_bytes(json.dumps(message).encode())

    def serve(self) -> None:
        names = {f.function for functions in self.settings.functions.values() for f in functions.values()}
        notes = [NOTES[name]() for name in NOTES if name in names]
        self.send(ready=True, batched=self.batched, has_async=self.loop is not None, notes=notes)
        while not self.retire_reason:
            for batch in self.split_into_batches(self.unpickle(pickle.loads(self.connection.recv_bytes()))):
                self.judge(batch)
                if self.retire_reason:
                    break
            else:
                self.send(idle=True)
        while self.async_pending:
            threading.Event().wait(0.01)
        self.send(retire=self.retire_reason)

    def unpickle(self, items: list[tuple[int, str, bytes]]) -> list[tuple[int, str, Any]]:
        """Unpickles each sample's inputs. A sample whose row cannot be loaded here fails; the others go on."""
        samples = []
        for number, function_set, pickled in items:
            try:
                samples.append((number, function_set, pickle.loads(pickled)))
            except Exception as error:
                detail = f"the sample cannot be read in a reward process: {type(error).__name__}: {error}"
                self.answer(number, Verdict(None, failure="exception", detail=detail))
        return samples

    def split_into_batches(self, samples: list[tuple[int, str, Any]]) -> list[list[tuple[int, str, Any]]]:
        """Returns the samples that are judged together: of one function set, several where a function takes lists."""
        by_set: dict[str, list[tuple[int, str, Any]]] = {}
        for sample in samples:
            by_set.setdefault(sample[1], []).append(sample)
        size = self.batch_size
        return [group[i : i + size] for group in by_set.values() for i in range(0, len(group), size)]

    def judge(self, samples: list[tuple[int, str, Any]]) -> None:
        numbers, inputs = [number for number, _, _ in samples], [inputs for _, _, inputs in samples]
        judge = self.judges[samples[0][1]]

        def on_start(indices: Sequence[int], seconds: float) -> None:
            self.send(running=[numbers[i] for i in indices], seconds=seconds, where="thread")

        parts = judge.judge_sync(inputs, on_start)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left set would go off in another sample
        if self.loop and judge.async_rewards:
            self.send(running=[], seconds=0.0, where="thread")
            with self.lock:
                self.async_pending += len(samples)
            asyncio.run_coroutine_threadsafe(self.judge_async(judge, numbers, inputs, parts), self.loop)
            return
        for number, part in zip(numbers, parts, strict=True):
            self.answer(number, judge.combine(part))

    async def judge_async(self, judge: "Judge", numbers: list[int], inputs: list[Any], parts: list[Any]) -> None:
        async with self.loop_slots:

            def start() -> None:
                self.send(running=numbers, seconds=judge.async_limit_s + GRACE_S, where="loop")

            start()
            try:
                await judge.judge_async(inputs, parts, restart=start)
            except asyncio.CancelledError:  # a function cancelled the task it runs in
                error = RuntimeError("it cancelled its own task")
                parts = [{r.name: r.error_verdict(error) for r in judge.async_rewards} for _ in numbers]
        for number, part in zip(numbers, parts, strict=True):
            self.answer(number, judge.combine(part))
        with self.lock:
            self.async_pending -= len(numbers)

    def answer(self, number: int, verdict: Verdict) -> None:
        self.send(verdict=number, **dataclasses.asdict(verdict))
        left_threads = threading.active_count() - self.initial_threads
        if verdict.failure == "memory":
            self.retire_reason = "it ran out of memory"
        elif left_threads > MAX_LEFT_THREADS:
            self.retire_reason = f"functions left {left_threads} threads running"


def preload(settings: RewardSettings) -> None:
    """Imports what a server needs, once for all processes that are forked."""
    from rlsys.rewards import Judge  # noqa: F401


def main(fd: int, parent: int) -> None:
    run_child(fd, parent, lambda c, settings: RewardServer(c, settings).serve, doing="loading the reward functions")
