"""Plays episodes in an episode process, and replaces the process when it crashes, stalls, or is past a deadline.

    send(commands) ──▶ supervisor thread ──▶ episode process (workers/episodes/process.py)
    events(line)   ◀──┘

The plays of a process that has ended are `Lost`, or have failed, if one took too long. Engines have them played again.
"""

import pickle
import queue
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlsys.episodes.settings import EpisodeSettings
from rlsys.types import Episode, Verdict
from workers.processes.handle import ProcessHandle
from workers.processes.supervisor import SILENCE_LIMIT_S, Cause, ProcessSupervisor
from workers.turns.messages import (
    LINE_BITS,
    Answer,
    Asked,
    Command,
    Drop,
    Ended,
    EndLine,
    Event,
    Lost,
    Start,
    batching_s,
)

SIGN_OF_LIFE_S = 1.0  # between two messages that say nothing
GRACE_S = 1.0  # for an episode to stop by itself, before its process is killed
DROP_S = 10.0  # or step_timeout_s: for a dropped episode to end, before its process is replaced


@dataclass(eq=False)
class Played:
    """A play, and its progress in the process."""

    start: Start
    asked: int = 0  # turns that it has asked for
    began: bool = False  # its code has run in the process
    waits: set[int] = field(default_factory=set)  # for these turns
    step_began: float | None = None  # while it is not waiting for a turn
    outside_s: float = 0.0
    late: bool = False  # it has been cancelled there, and the event loop went on


class EpisodeRunner(ProcessSupervisor):
    """One episode process and its spare. `send` and `events` may be called by any thread."""

    module, name, gathering_s = "workers.episodes.process", "episode", 0.002

    def __init__(self, settings: EpisodeSettings):
        self.limits = settings
        self.commands: deque[Command] = deque()
        self.waiting: deque[Played] = deque()  # not yet in the process
        self.playing: dict[int, Played] = {}  # in the process, by number
        self.working: set[Played] = set()  # of these, the ones that have begun and are not waiting for a turn
        self.dropped: dict[int, float] = {}  # still in the process, with the deadline for their end
        self.last_begin = 0.0
        self.outgoing: list[tuple[Any, ...]] = []  # to the process
        self.running: int | None = None  # number of the episode whose code ran last
        self.reports = 0  # events so far
        self.lines: dict[str, int] = {}  # by engine
        self.ended_lines: set[int] = set()
        self.events_of: defaultdict[int, queue.SimpleQueue[Event | Exception | None]] = defaultdict(queue.SimpleQueue)
        self.started = False
        super().__init__(settings)

    def send(self, commands: list[Command]) -> None:
        """Takes commands, but no start on a line that has ended: nobody would answer the play."""
        self.commands += [
            c for c in commands if not (isinstance(c, Start) and c.number >> LINE_BITS in self.ended_lines)
        ]
        self.poller.wake()
        if self.ended:
            self.fail_all()

    def begin_line(self, engine: str, line: int) -> None:
        """Begins the line of an engine, and ends that of another process of it: a lost one, or one that begins it again."""
        before = self.lines.get(engine, line)
        self.lines[engine] = line
        self.ended_lines.discard(line)
        self.events_of[line]  # what comes before `events` is called waits there
        if before != line:
            self.ended_lines.add(before)
            self.send([EndLine(before)])
            self.events_of.pop(before).put(None)

    def events(self, line: int) -> Iterator[list[Event]]:
        """Yields what episodes ask for, and how they end. Raises the error after which no episode can be played.

        An empty list says that nothing is wrong: others have events, or all that are played wait for their turns.
        """
        if line in self.ended_lines:
            return
        arrived, events, reports = self.events_of[line], list[Event | Exception | None](), self.reports
        while True:
            try:
                events = [arrived.get(timeout=SIGN_OF_LIFE_S)]
            except queue.Empty:
                if reports == self.reports and (self.working or self.commands):
                    continue
                events = []
            reports = self.reports
            time.sleep(batching_s(len(self.playing)))
            while not arrived.empty():
                events.append(arrived.get())
            if error := next((e for e in events if isinstance(e, Exception)), None):
                raise error
            if None in events:
                return
            yield [e for e in events if not isinstance(e, Exception | None)]

    def report(self, event: Event) -> None:
        self.reports += 1
        events = self.events_of.get(event.number >> LINE_BITS)
        if events is not None:  # else its engine was lost
            events.put(event)

    # --- the supervisor thread ---------------------------------------------------------------------------------------

    def send_work(self) -> None:
        assert self.process is not None
        while self.commands:
            command = self.commands.popleft()
            if isinstance(command, Start):
                self.waiting.append(Played(command))
            elif isinstance(command, Answer):
                self.answer(command)
            elif isinstance(command, Drop):
                self.drop(command.number)
            else:
                self.end_line(command.number)
        while self.waiting and len(self.playing) + len(self.dropped) < self.limits.concurrency:
            self.begin(self.waiting.popleft())
        if self.outgoing:
            self.process.send(self.outgoing)
            self.outgoing = []

    def begin(self, played: Played) -> None:
        start = played.start
        try:
            row = pickle.dumps(start.row)
        except Exception as error:  # a row may hold anything
            detail = f"the row cannot be sent to an episode process: {type(error).__name__}: {error}"
            return self.fail(played, "exception", detail)
        if not self.started:
            self.started = True
            self.start_spare()  # not earlier: when a run starts, others need the cores
        self.playing[start.number] = played
        self.last_begin = time.monotonic()
        self.outgoing.append(("start", start.number, start.play, row, start.max_new_tokens, start.sampling))

    def begin_step(self, played: Played) -> None:
        played.step_began = time.monotonic()
        self.working.add(played)

    def end_step(self, played: Played) -> None:
        if played.step_began is not None:
            played.outside_s += time.monotonic() - played.step_began
        played.step_began = None
        self.working.discard(played)

    def answer(self, command: Answer) -> None:
        played = self.playing.get(command.number)
        if played and command.asked in played.waits:
            played.waits.remove(command.asked)
            if not played.waits:
                self.begin_step(played)
            turn = command.asked, command.tokens, command.logprobs, command.finish
            self.outgoing.append(("turn", command.number, *turn))

    def drop(self, number: int) -> None:
        self.waiting = deque(p for p in self.waiting if p.start.number != number)
        if played := self.playing.pop(number, None):
            self.working.discard(played)
            self.outgoing.append(("drop", number))
            self.dropped[number] = time.monotonic() + min(self.limits.step_timeout_s, DROP_S) + GRACE_S

    def end_line(self, line: int) -> None:
        numbers = [*self.playing, *(played.start.number for played in self.waiting)]
        for number in numbers:
            if number >> LINE_BITS == line:
                self.drop(number)

    def has_work(self) -> bool:
        return self.started

    def on_message(self, process: ProcessHandle, message: dict[str, Any]) -> None:
        """Handles one message; workers/episodes/process.py lists them."""
        if "on" in message:
            self.running = message["on"]
            if (played := self.playing.get(message["on"])) and not played.began:
                played.began = True
                self.begin_step(played)
        elif "dropped" in message:
            self.dropped.pop(message["dropped"], None)
        elif "late" in message and (played := self.playing.get(message["late"])):
            played.late = True
        elif "ask" in message and (played := self.playing.get(message["ask"])):
            what = {name: value for name, value in message.items() if name != "ask"}
            self.on_ask(played, Asked(played.start.number, **what | {"stop": tuple(message["stop"])}))
        elif "end" in message and message["end"] in self.playing:
            self.working.discard(self.playing.pop(message["end"]))
            self.running = None
            verdict = message["verdict"] and Verdict(**message["verdict"])
            episode = Episode(verdict, message["messages"], message["turn_scores"])
            self.report(Ended(message["end"], message["finish"], episode, tuple(message["turns"])))

    def on_ask(self, played: Played, asked: Asked) -> None:
        self.running = None
        self.end_step(played)
        self.report(asked)
        played.asked += 1
        played.waits.add(asked.turn)

    # --- deadlines and crashes ---------------------------------------------------------------------------------------

    def deadline(self, played: Played) -> float | None:
        if played.step_began is None:
            return None
        seconds = min(self.limits.step_timeout_s, self.limits.timeout_s - played.outside_s)
        return played.step_began + max(seconds, 0.0) + GRACE_S

    def next_deadline(self) -> float | None:
        deadlines = [*filter(None, map(self.deadline, self.working)), *self.dropped.values()]
        played = self.playing.values()
        if not self.working and any(not p.began for p in played) and not any(p.waits for p in played):
            deadlines.append(max(self.last_message, self.last_begin) + SILENCE_LIMIT_S)
        return min(deadlines, default=None)

    def replace_overdue(self, now: float) -> None:
        if (deadline := self.next_deadline()) is None or deadline > now:
            return
        if any((self.deadline(played) or now + 1) <= now for played in self.working):
            return self.replace_process("timeout")
        reason = "a dropped episode goes on" if deadline in self.dropped.values() else "it begins no episode"
        print(f"episode process replaced: {reason}", flush=True)
        self.replace_process("retired")

    def hand_back(self, cause: Cause, now: float, exit_status: str) -> None:
        """After a process has ended, reports its plays as lost, or as failed if one took too long.

        If a deadline has passed, the cause is the play that did not end when it was cancelled, or else the one whose code
        was running, as it blocks the others. After a crash, suspects are the one whose code was running, or else all that
        were not waiting. If the code was a task that a play has left behind, none is.
        """
        overdue = {p for p in self.working if (self.deadline(p) or now + 1) <= now}
        suspects = overdue if cause == "timeout" else set(self.working)
        if self.running is not None:
            suspects = {p for p in self.playing.values() if p.start.number == self.running}
        self.running = None
        failed = ({p for p in overdue if p.late} or suspects) if cause == "timeout" else set()
        lost = [played for played in self.playing.values() if played not in failed]
        self.playing, self.working, self.outgoing, self.dropped = {}, set(), [], {}
        limit = self.limits.step_timeout_s
        for played in failed:
            detail = f"a step took more than {limit:g} s (episode.step_timeout_s); process killed"
            self.fail(played, "timeout", f"{detail}, after turn {played.asked}" if played.asked else detail)
        for played in lost:
            suspect = cause == "crash" and played in suspects
            self.report(Lost(played.start.number, played.asked, suspect, exit_status))

    def fail(self, played: Played, failure: str, detail: str) -> None:
        episode = Episode(Verdict(None, failure=failure, detail=detail), [], [])
        finish = "time" if failure == "timeout" else "stop"
        turns = tuple(turn for turn in range(played.asked) if turn not in played.waits)
        self.report(Ended(played.start.number, finish, episode, turns))

    def fail_work(self, error: Exception) -> None:
        for events in self.events_of.values():
            events.put(error)
