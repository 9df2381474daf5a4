"""One reward process, watched: whatever happens in it, every sample gets a verdict, or goes back to be judged elsewhere.

One thread, the keeper, starts processes, feeds and watches them, and kills the one whose deadline has passed. Beside the
process in use a second one stands by with its imports done, so that a kill costs no waiting. Functions run outside the actor
because only another process can be stopped for certain.
"""

import contextlib
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.rewards.settings import RewardSettings
from rlsys.types import Verdict
from workers.reward.process_handle import ProcessHandle

SILENCE_LIMIT_S = 30.0  # a process that has samples and says nothing for so long is not well
MAX_FAILED_STARTS = 3  # times in a row that importing may fail, once it has worked, or end its process


@dataclass
class RewardItem:
    function_set: str  # whose reward functions
    inputs: dict[str, Any]
    alone: bool = False  # nothing else may run beside it: it may be the one that ends processes


JudgeResult = Verdict | RewardItem  # an item comes back where another sample took the process down


class RewardRunner:
    def __init__(self, settings: RewardSettings):
        self.settings = settings
        self.waiting: deque[tuple[RewardItem, Future[JudgeResult]]] = deque()
        self.sent: dict[int, tuple[RewardItem, Future[JudgeResult]]] = {}  # by number
        # Until when, and how many seconds that is, of the samples being judged, by where in the process.
        self.judging: dict[str, dict[int, tuple[float, float]]] = {"thread": {}, "loop": {}}
        self.number = 0
        self.ready: Future[dict[str, Any]] = Future()
        self.problem: ConfigError | None = None
        self.closing = False
        self.starts = 0  # that have failed in a row
        self.heard, self.alarm = socket.socketpair()
        self.alarm.setblocking(False)
        self.over = False
        self.process: ProcessHandle | None = None
        self.spare: ProcessHandle | None = None
        self.keeper = threading.Thread(target=self.keep, daemon=True, name="reward-keeper")
        self.keeper.start()

    def judge(self, items: list[RewardItem]) -> list[JudgeResult]:
        """One verdict per item; an item itself where it should be judged elsewhere, or again."""
        futures: list[Future[JudgeResult]] = [Future() for _ in items]
        self.waiting.extend(zip(items, futures, strict=True))
        self.wake()
        if self.over:
            self.give_up(self.problem or ConfigError("the reward runner was closed"))
        return [future.result() for future in futures]

    def close(self) -> None:
        self.closing = True
        self.wake()
        self.keeper.join()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or is over
            self.alarm.send(b".")

    # --- the keeper --------------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        try:
            self.process = ProcessHandle(self.settings)
            while not self.closing and self.problem is None:
                self.feed()
                ready = self.wait()
                if self.heard in ready:
                    self.heard.recv(4096)
                for process in self.processes():
                    if process.socket in ready:
                        process.flush()
                        self.hear(process)
                self.watch()
        except BaseException as error:  # never leave a caller waiting
            self.problem = ConfigError(f"the reward runner failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.over = True
            try:
                for process in self.processes():
                    process.kill()
            finally:
                self.give_up(self.problem or ConfigError("the reward runner was closed"))
                self.heard.close()
                self.alarm.close()

    def processes(self) -> list[ProcessHandle]:
        return [p for p in (self.process, self.spare) if p]

    def wait(self) -> list[Any]:
        """The sockets that have something to read, or room for what is unsent, when there are any or something is due."""
        with selectors.PollSelector() as selector:
            selector.register(self.heard, selectors.EVENT_READ)
            for process in self.processes():
                selector.register(
                    process.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
                )
            return [key.fileobj for key, _ in selector.select(self.patience())]

    def feed(self) -> None:
        """Hands over what is waiting, if the process's main thread is free to take it."""
        if not (self.waiting and self.process and self.process.ready_info and self.process.idle):
            return
        if not self.number:
            self.stand_by()  # not before: when a run starts, others need the cores
        items = []
        while self.waiting:
            item, future = self.waiting[0]
            if self.sent and (item.alone or next(iter(self.sent.values()))[0].alone):
                break
            self.waiting.popleft()
            try:
                facts = pickle.dumps(item.inputs)
            except Exception as error:  # a row may hold anything
                sentence = f"the sample cannot be sent to a reward process: {type(error).__name__}: {error}"
                future.set_result(Verdict(None, failure="exception", detail=sentence))
                continue
            self.number += 1
            self.sent[self.number] = item, future
            items.append((self.number, item.function_set, facts))
        if not items:
            return
        self.process.idle = False
        self.heard_at = time.monotonic()
        self.process.send(items)

    def hear(self, process: ProcessHandle) -> None:
        try:
            for message in process.read_messages():
                self.told(process, message)
                if self.problem or process not in self.processes():
                    return
        except (OSError, ValueError, KeyError, TypeError):  # it has died, or user's code wrote to the socket
            process.closed = True
        if process.closed and process.ready_info is None:
            self.failed(process, "importing ended the process")
        elif process.closed and process is self.spare:
            self.spare = None
            process.kill()
        elif process.closed:
            self.replace("crash")

    def told(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        self.heard_at = time.monotonic()
        if "problem" in message:
            self.failed(process, message["problem"])
        elif "ready" in message:
            process.ready_info, process.idle = message, True
            if process is self.process and not self.ready.done():
                self.ready.set_result(message)
            self.starts = 0
            if self.number:
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
            process.idle = True
        elif "bye" in message:
            print(f"reward process replaced: {message['bye']}", flush=True)
            self.replace("bye")

    def failed(self, process: ProcessHandle, sentence: str) -> None:
        """Its functions could not be imported: tried again if they could be before, or if somebody may have killed it."""
        how = process.kill()
        ended = sentence == "importing ended the process"
        if ended:
            sentence = f"{self.names()}: importing ended the process ({how})."
        sentence = sentence.encode(errors="replace").decode()
        print(f"reward process did not start: {sentence}", flush=True)
        if process is self.spare:
            self.spare = None
            return
        self.starts += 1
        if not (ended or self.ready.done()) or self.starts >= MAX_FAILED_STARTS:
            self.problem = ConfigError(sentence)
        else:
            self.process = ProcessHandle(self.settings)

    @property
    def deadlines(self) -> dict[int, tuple[float, float]]:
        return self.judging["thread"] | self.judging["loop"]

    def patience(self) -> float:
        """Seconds until the next thing is due."""
        deadlines = self.deadlines
        due = [until for until, _ in deadlines.values()]
        due += [p.started_at + self.settings.start_timeout_s for p in self.processes() if p.ready_info is None]
        if self.sent and not deadlines:
            due.append(self.heard_at + SILENCE_LIMIT_S)
        return max(0.0, min(due) - time.monotonic()) if due else SILENCE_LIMIT_S

    def watch(self) -> None:
        """Ends what is past its deadline."""
        now = time.monotonic()
        for process in self.processes():
            if process.ready_info is None and now > process.started_at + self.settings.start_timeout_s:
                self.failed(process, f"{self.names()}: importing took more than {self.settings.start_timeout_s:g} s.")
        if any(until <= now for until, _ in self.deadlines.values()):
            self.replace("timeout")
        elif self.sent and not self.deadlines and now > self.heard_at + SILENCE_LIMIT_S:
            self.judging["thread"] = dict.fromkeys(self.sent, (now, SILENCE_LIMIT_S))
            self.replace("crash")

    def replace(self, why: str) -> None:
        """Kills the process, says what became of its samples, and goes on with the spare one."""
        assert self.process is not None
        now = time.monotonic()
        how = self.process.kill()
        deadlines = self.deadlines if why != "bye" else {}
        guilty = [n for n, (until, _) in deadlines.items() if why == "crash" or until <= now]
        for number, (item, future) in self.sent.items():
            if number not in guilty:
                future.set_result(item)
            elif not item.alone and (len(guilty) > 1 or why == "crash" or self.together(number)):
                # Which one it was, or whether somebody else has ended the process, being alone will show.
                future.set_result(replace(item, alone=True))
            elif why == "timeout":
                sentence = (
                    f"no verdict after {deadlines[number][1]:g} s (reward.timeout_s, or its deadline_s); process killed"
                )
                future.set_result(Verdict(None, failure="timeout", detail=sentence))
            else:
                future.set_result(Verdict(None, failure="crash", detail=f"the reward process ended: {how}"))
        self.sent, self.judging = {}, {"thread": {}, "loop": {}}
        self.process, self.spare = self.spare or ProcessHandle(self.settings), None
        if self.process.ready_info:
            self.stand_by()

    def together(self, number: int) -> bool:
        """Whether others are at it too, in the same event loop: one that holds it up may not have got to say so."""
        return number in self.judging["loop"] and len(self.sent) > 1

    def stand_by(self) -> None:
        if self.spare is None and self.settings.keep_spare:
            self.spare = ProcessHandle(self.settings)

    def give_up(self, error: ConfigError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        for _, future in self.sent.values():
            if not future.done():
                future.set_exception(error)
        with contextlib.suppress(IndexError):
            while True:
                self.waiting.popleft()[1].set_exception(error)

    def names(self) -> str:
        used = {f.function for functions in self.settings.functions.values() for f in functions.values()}
        return f"reward.functions ({', '.join(sorted(used))})"
