"""The process that runs reward functions. `workers.reward.supervisor` starts, feeds, watches and kills it.

    runner ──pickle [(number, set, pickled facts), …]──▶ process      set: which functions judge; "" for reward.functions
           ◀── {"ready": true, …}, or {"problem": sentence}    once, when the functions are imported
           ◀── {"now": [numbers], "within": s, "place": …}  these, and no others, are being judged in the main thread; or
                                                               these too in the loop. From here their deadline runs
           ◀── {"verdict": number, "score": …, …}
           ◀── {"more": true}                                  its main thread is free: the next list may come
           ◀── {"bye": reason}                                 it wants to be replaced; what it did not judge is for another

Functions that are not async run one sample after the other in the main thread, so that a user's signals and event loops
work; those that are run in one event loop beside it. Answers are JSON: nothing that user's code sends is unpickled.

Covered: it ends with its runner; it is killed past the deadline with everything it started; `reward.memory_mb` limits
what it allocates. Not covered: files, network and environment are the user's. Do not run untrusted code in a reward
function, but in the sandbox that the built-in `code` uses.
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import pickle
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.rewards.functions import NOTES
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict

GRACE_S = 1.0  # for async functions to stop by themselves, which takes no process down
LEFT_BEHIND = 32  # threads that functions may leave running before the process is replaced


class RewardServer:
    def __init__(self, connection: Connection, settings: RewardSettings):
        from rlsys.rewards import Judge

        self.connection, self.settings, self.lock = connection, settings, threading.Lock()
        self.pid = os.getpid()
        self.judges = {
            name: Judge(functions, timeout_s=settings.timeout_s) for name, functions in settings.functions.items()
        }
        self.batched = any(judge.batched for judge in self.judges.values())
        self.spent = ""  # why it wants to be replaced
        self.unfinished = 0  # samples that async functions are at
        self.loop: asyncio.AbstractEventLoop | None = None
        if any(judge.async_rewards for judge in self.judges.values()):
            self.loop = asyncio.new_event_loop()
            together = settings.batch if self.batched else 1
            self.places = asyncio.Semaphore(max(1, settings.concurrency // together))
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.threads = threading.active_count()

    def say(self, **message: Any) -> None:
        if os.getpid() != self.pid:  # a function has forked, and its child came back from it
            os._exit(0)
        with self.lock:
            self.connection.send_bytes(json.dumps(message).encode())

    def now(self, numbers: list[int], within: float, place: str) -> None:
        self.say(now=numbers, within=within, place=place)

    def serve(self) -> None:
        used = {f.function for functions in self.settings.functions.values() for f in functions.values()}
        notes = [NOTES[name]() for name in NOTES if name in used]
        self.say(ready=True, batched=self.batched, waits=self.loop is not None, notes=notes)
        while not self.spent:
            for share in self.shares(self.unpacked(pickle.loads(self.connection.recv_bytes()))):
                self.judge(share)
                if self.spent:
                    break
            else:
                self.say(more=True)
        while self.unfinished:
            threading.Event().wait(0.01)
        self.say(bye=self.spent)

    def unpacked(self, items: list[tuple[int, str, bytes]]) -> list[Any]:
        """The items with their facts. A row may hold what cannot be loaded here: its sample alone has failed."""
        found = []
        for number, which, packed in items:
            try:
                found.append((number, which, pickle.loads(packed)))
            except Exception as error:
                sentence = f"the sample cannot be read in a reward process: {type(error).__name__}: {error}"
                self.answer(number, Verdict(None, failure="exception", detail=sentence))
        return found

    def shares(self, items: list[Any]) -> list[list[Any]]:
        """What is judged in one go: samples of one set, several where a function takes lists."""
        size = self.settings.batch if self.batched else 1
        by_set: dict[str, list[Any]] = {}
        for item in items:
            by_set.setdefault(item[1], []).append(item)
        return [same[i : i + size] for same in by_set.values() for i in range(0, len(same), size)]

    def judge(self, items: list[Any]) -> None:
        numbers, facts = [number for number, _, _ in items], [facts for _, _, facts in items]
        judge = self.judges[items[0][1]]
        parts = judge.judge_sync(facts, lambda which, within: self.now([numbers[i] for i in which], within, "thread"))
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left set would go off in another sample
        if self.loop and judge.async_rewards:
            self.now([], 0.0, "thread")
            with self.lock:
                self.unfinished += len(items)
            asyncio.run_coroutine_threadsafe(self.finish(judge, numbers, facts, parts), self.loop)
            return
        for number, found in zip(numbers, parts, strict=True):
            self.answer(number, judge.combine(found))

    async def finish(self, judge: Any, numbers: list[int], facts: list[Any], parts: list[Any]) -> None:
        async with self.places:
            self.now(numbers, judge.async_limit_s + GRACE_S, "loop")
            try:
                await judge.judge_async(facts, parts)
            except asyncio.CancelledError:  # a function cancelled the task it runs in
                parts = [
                    {t.name: t.error_verdict(RuntimeError("it cancelled its own task")) for t in judge.async_rewards}
                    for _ in numbers
                ]
        for number, found in zip(numbers, parts, strict=True):
            self.answer(number, judge.combine(found))
        with self.lock:
            self.unfinished -= len(numbers)

    def answer(self, number: int, verdict: Verdict) -> None:
        self.say(verdict=number, **dataclasses.asdict(verdict))
        left = threading.active_count() - self.threads
        if verdict.failure == "memory":
            self.spent = "it ran out of memory"
        elif left > LEFT_BEHIND:
            self.spent = f"functions left {left} threads running"


def main(fd: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the runner
    if os.getppid() != parent:
        return
    os.set_inheritable(fd, False)  # if a child held it, the runner would not see that this process has ended
    held = [fd]

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    connection = Connection(fd)
    try:
        settings: RewardSettings = pickle.loads(connection.recv_bytes())
        if limit := settings.memory_mb << 20:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            server = RewardServer(connection, settings)
        except ConfigError as error:
            return connection.send_bytes(json.dumps({"problem": str(error)}).encode())
        except BaseException as error:  # a user's file may raise anything, SystemExit included
            return connection.send_bytes(
                json.dumps({"problem": f"loading the reward functions raised {type(error).__name__}: {error}"}).encode()
            )
        server.serve()
    except EOFError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
