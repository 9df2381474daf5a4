"""One reward process, watched: whatever happens in it, every sample gets a verdict, or goes back to be judged elsewhere.

One thread, the keeper, starts processes, feeds and watches them, and kills the one whose deadline has passed. Beside the
process in use a second one stands by with its imports done, so that a kill costs no waiting. Functions run outside the actor
because only another process can be stopped for certain.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from json import loads
from multiprocessing.connection import Connection, wait
from typing import Any

from rlsys.config import ConfigError
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict

IDLE_S = 30.0  # a process that has samples and judges none for so long is not well


@dataclass
class Item:
    set: str  # whose reward functions
    facts: dict[str, Any]
    alone: bool = False  # nothing else may run beside it: it may be the one that ends processes


Answer = Verdict | Item  # an item comes back where another sample took the process down


class Process:
    """A process and the two ends of what is said. `ready` when its functions are imported."""

    def __init__(self, settings: RewardSettings):
        ours, theirs = socket.socketpair()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "workers.reward_process", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts can be killed with it
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"}
            | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it is already dead: reading will say so
            self.connection.send_bytes(pickle.dumps(settings))
        self.began = time.monotonic()
        self.facts: dict[str, Any] | None = None  # what it said of itself when it was ready
        self.free = False

    def end(self) -> str:
        """Kills it and all it started; returns how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        code = self.child.wait()
        self.connection.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class RewardRunner:
    def __init__(self, settings: RewardSettings):
        self.settings = settings
        self.waiting: deque[tuple[Item, Future[Answer]]] = deque()
        self.sent: dict[int, tuple[Item, Future[Answer]]] = {}  # by number
        # Until when, and how many seconds that is, of the samples being judged, by where in the process.
        self.judging: dict[str, dict[int, tuple[float, float]]] = {"thread": {}, "loop": {}}
        self.number = 0
        self.ready: Future[dict[str, Any]] = Future()
        self.problem: ConfigError | None = None
        self.closing = False
        self.heard, self.alarm = socket.socketpair()
        self.keeper = threading.Thread(target=self.keep, daemon=True, name="reward-keeper")
        self.keeper.start()

    def judge(self, items: list[Item]) -> list[Answer]:
        """One verdict per item; an item itself where it should be judged elsewhere, or again."""
        futures: list[Future[Answer]] = [Future() for _ in items]
        self.waiting.extend(zip(items, futures, strict=True))
        self.wake()
        if not self.keeper.is_alive():
            self.give_up(self.problem or ConfigError("the reward runner was closed"))
        return [future.result() for future in futures]

    def close(self) -> None:
        self.closing = True
        self.wake()
        self.keeper.join()

    def wake(self) -> None:
        self.alarm.send(b".")

    # --- the keeper --------------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        self.process = Process(self.settings)
        self.spare: Process | None = None
        try:
            while not self.closing and self.problem is None:
                self.feed()
                ready = wait([self.heard, *self.connections()], self.patience())
                if self.heard in ready:
                    self.heard.recv(4096)
                for process in [p for p in (self.process, self.spare) if p and p.connection in ready]:
                    self.hear(process)
                self.watch()
        except BaseException as error:  # never leave a caller waiting
            self.problem = ConfigError(f"the reward runner failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.process.end()
            if self.spare:
                self.spare.end()
            self.give_up(self.problem or ConfigError("the reward runner was closed"))

    def connections(self) -> list[Connection]:
        return [p.connection for p in (self.process, self.spare) if p]

    def feed(self) -> None:
        """Hands over what is waiting, if the process's main thread is free to take it."""
        if not (self.waiting and self.process.facts and self.process.free):
            return
        items = []
        while self.waiting:
            item, future = self.waiting[0]
            if self.sent and (item.alone or next(iter(self.sent.values()))[0].alone):
                break
            self.waiting.popleft()
            self.number += 1
            self.sent[self.number] = item, future
            items.append((self.number, item.set, item.facts))
        if not items:
            return
        self.process.free = False
        self.fed = time.monotonic()
        with contextlib.suppress(OSError):  # it has died: reading will say so
            self.process.connection.send_bytes(pickle.dumps(items))

    def hear(self, process: Process) -> None:
        try:
            while self.problem is None and process.connection.poll():
                self.told(process, loads(process.connection.recv_bytes()))
                if process not in (self.process, self.spare):
                    return
        except (EOFError, OSError, ValueError, KeyError, TypeError):  # it has died, or user's code wrote to the socket
            if process is self.spare:
                self.spare.end()
                self.spare = None
            elif process.facts is None:
                how = process.end()
                self.problem = ConfigError(f"{self.names()}: importing ended the process ({how}).")
            else:
                self.replace("crash")

    def told(self, process: Process, message: dict[str, Any]) -> None:
        if "problem" in message:
            self.problem = ConfigError(message["problem"])
        elif "ready" in message:
            process.facts, process.free = message, True
            if process is self.process and not self.ready.done():
                self.ready.set_result(message)
            self.stand_by()
        elif "now" in message:
            limit = time.monotonic() + message["within"], message["within"]
            others = self.judging["loop"] if message["place"] == "loop" else {}
            self.judging[message["place"]] = others | dict.fromkeys(message["now"], limit)
        elif "verdict" in message:
            number = message["verdict"]
            for place in self.judging.values():
                place.pop(number, None)
            _, future = self.sent.pop(number)
            future.set_result(
                Verdict(
                    message["score"], message["components"], message["failure"], message["detail"], message["answer"]
                )
            )
        elif "more" in message:
            process.free = True
        elif "bye" in message:
            print(f"reward process replaced: {message['bye']}", flush=True)
            self.replace("bye")

    @property
    def deadlines(self) -> dict[int, tuple[float, float]]:
        return self.judging["thread"] | self.judging["loop"]

    def patience(self) -> float:
        """Seconds until the next thing is due."""
        deadlines = self.deadlines
        due = [until for until, _ in deadlines.values()]
        due += [p.began + self.settings.start_s for p in (self.process, self.spare) if p and p.facts is None]
        if self.sent and not deadlines:
            due.append(self.fed + IDLE_S)
        return max(0.0, min(due) - time.monotonic()) if due else IDLE_S

    def watch(self) -> None:
        """Ends what is past its deadline."""
        now = time.monotonic()
        if self.process.facts is None and now > self.process.began + self.settings.start_s:
            self.problem = ConfigError(f"{self.names()}: importing took more than {self.settings.start_s:g} s.")
        elif any(until <= now for until, _ in self.deadlines.values()):
            self.replace("timeout")
        elif self.sent and not self.deadlines and now > self.fed + IDLE_S:
            self.judging["thread"] = dict.fromkeys(self.sent, (now, IDLE_S))
            self.replace("crash")

    def replace(self, why: str) -> None:
        """Kills the process, says what became of its samples, and goes on with the spare one."""
        now = time.monotonic()
        how = self.process.end()
        deadlines = self.deadlines if why != "bye" else {}
        guilty = [n for n, (until, _) in deadlines.items() if why == "crash" or until <= now]
        for number, (item, future) in self.sent.items():
            if number not in guilty:
                future.set_result(item)
            elif len(guilty) > 1:  # which one it was, being alone will show
                future.set_result(replace(item, alone=True))
            elif why == "timeout":
                sentence = (
                    f"no verdict after {deadlines[number][1]:g} s (reward.timeout_s, or its deadline_s); process killed"
                )
                future.set_result(Verdict(None, failure="timeout", detail=sentence))
            else:
                future.set_result(Verdict(None, failure="crash", detail=f"the reward process ended: {how}"))
        self.sent, self.judging = {}, {"thread": {}, "loop": {}}
        self.process, self.spare = self.spare or Process(self.settings), None
        if self.process.facts:
            self.stand_by()

    def stand_by(self) -> None:
        if self.spare is None and self.settings.spare:
            self.spare = Process(self.settings)

    def give_up(self, error: ConfigError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        for _, future in [*self.sent.values(), *self.waiting]:
            if not future.done():
                future.set_exception(error)

    def names(self) -> str:
        used = {f.function for functions in self.settings.functions.values() for f in functions.values()}
        return f"reward.functions ({', '.join(sorted(used))})"
