"""The process that plays episodes. `workers.episodes.runner` starts it, sends it rows and turns, and replaces it.

    runner ──pickle [("start", number, play, pickled row, max_new_tokens), …]──▶ process
           ──pickle [("turn", number, tokens, logprobs, finish), …]──▶
           ──pickle [("drop", number), …]──▶
           ◀── {"ready": true, "notes": […]}, or {"problem": sentence}   once, when the functions are imported
           ◀── {"on": number}                        code of this episode runs from now on
           ◀── {"ask": number, "observation": […], "max_tokens": n}
           ◀── {"late": number}                      its time is over, and it has been cancelled
           ◀── {"dropped": number}                   it has been dropped, and nothing of it runs any more
           ◀── {"end": number, "turns": n, "finish": …, "verdict": …, "messages": …, "turn_scores": …}
           ◀── {"retire": reason}                    it wants to be replaced; its other episodes are played again

All episodes, and the tasks that they start, run in one event loop in the main thread, where the code of each delays all
others. So an episode begins only while few others run; one that waits, as for a page of the web, holds up none. Answers are
JSON: nothing that a user's function sends is unpickled. Users' functions are limited as described in `workers.reward.process`.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import json
import os
import pickle
import socket
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlsys.data.render import read_template
from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.asking import EpisodeAsk, Limits, Turn
from rlsys.episodes.conversation import ConversationTemplate, continuation_notes
from rlsys.episodes.formats import known_tool_parsers, suggest_tool_parser
from rlsys.episodes.player import Equipment, Player
from rlsys.episodes.settings import EpisodeSettings
from rlsys.episodes.tools import Toolbox
from rlsys.errors import ConfigError
from rlsys.models.end_ids import model_end_ids
from rlsys.rewards.weighted_reward import exception_verdict
from rlsys.types import Verdict
from workers.episodes.step_threads import EPISODE, StepThreads
from workers.processes.child import close_in_children, run_child
from workers.start.imports import skip_generation_import

MAX_RUNNING = 64  # episodes whose code runs: no other begins
ROUND_S = 0.01  # or longer, so that all code has run that could
SERVER = -1  # stands for the number of an episode: no episode may cancel the server's own task
encode_json = json.JSONEncoder(default=str).encode


class EpisodeServer:
    def __init__(self, connection: Connection, settings: EpisodeSettings):
        self.connection, self.settings, self.pid = connection, settings, os.getpid()
        self.loop = asyncio.new_event_loop()  # one loop for all calls of tools: the client of a server belongs to it
        equipment = self.loop.run_until_complete(equip(settings))
        self.players = {spec: Player(spec, settings, equipment) for spec in settings.plays}
        ends = model_end_ids(settings.model, equipment.template.tokenizer, settings.trust_remote_code)
        self.notes = continuation_notes(equipment.template, equipment.schemas, {*ends, *settings.stop_token_ids})
        self.waiting: dict[str, dict[int, tuple[bytes, int]]] = defaultdict(dict)  # to begin, by play
        self.running: dict[int, RunningEpisode] = {}  # has begun
        self.ran: set[int] = set()  # whose code ran in this round
        self.ran_before: set[int] = set()  # in the last one
        self.next_round: asyncio.TimerHandle | None = None
        self.no_episode = contextvars.copy_context()
        self.threads = StepThreads(settings.concurrency)
        self.unsent = bytearray()
        self.announced: int | None = None  # in the last message

    def serve(self) -> None:
        serving = EpisodeTask(self.serve_forever(), SERVER, self.loop)
        while not serving.done():
            with contextlib.suppress(RuntimeError):  # a function has stopped the loop
                self.loop.run_until_complete(serving)
        serving.result()

    async def serve_forever(self) -> None:
        self.loop.set_default_executor(self.threads)
        self.loop.set_task_factory(self.make_task)
        end = socket.socket(fileno=os.dup(self.connection.fileno()))
        close_in_children(end.fileno())
        reader, self.writer = await asyncio.open_connection(sock=end)
        self.send(ready=True, notes=list(dict.fromkeys(self.notes)))
        while True:
            try:
                commands = pickle.loads(await read_message(reader))
            except asyncio.IncompleteReadError:  # the runner has ended
                return
            for kind, number, *rest in commands:
                if kind == "start":
                    play, *rest = rest
                    self.waiting[play][number] = tuple(rest)
                elif kind == "drop":
                    self.drop(number)
                elif episode := self.running.get(number):
                    episode.resume(*rest)
            self.begin_soon(0.0)

    def send(self, **message: Any) -> None:
        """Sends a message soon, together with others."""
        self.end_if_forked()
        if not self.unsent:
            self.loop.call_soon(self.flush)
        data = encode_json(message).encode()
        self.unsent += struct.pack("!i", len(data)) + data
        self.announced = None

    def announce(self, number: int) -> None:
        """Reports at once that code of this episode runs now, because it may block or end the process."""
        self.ran.add(number)
        if self.announced != number:
            self.send(on=number)
            self.flush()
            self.announced = number

    def make_task(self, _: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> "asyncio.Task[Any]":
        """Makes a task, whose code is announced if an episode has started it."""
        context = options.get("context")
        number = EPISODE.get(None) if context is None else context.get(EPISODE)
        if number is not None:
            coroutine = run_announced(coroutine, partial(self.announce, number))
        return EpisodeTask(coroutine, number, self.loop, **options)

    def flush(self) -> None:
        self.end_if_forked()
        if self.unsent:
            self.writer.write(bytes(self.unsent))
            self.unsent.clear()

    def end_if_forked(self) -> None:
        """Ends this process if it is a child that a function has forked: it must send no messages."""
        if os.getpid() != self.pid:
            os._exit(0)

    def begin_soon(self, seconds: float) -> None:
        if self.next_round is None and any(self.waiting.values()):
            self.next_round = self.loop.call_later(seconds, self.begin_waiting, context=self.no_episode)

    def begin_waiting(self) -> None:
        """Begins as many episodes as there is room for, each of the play that has the fewest between two turns."""
        between_turns = {number: episode for number, episode in self.running.items() if episode.turn is None}
        running = (self.ran | self.ran_before) & between_turns.keys()
        room = min(MAX_RUNNING - len(running), self.threads.size - self.threads.count_of(self.running))
        count = Counter(episode.play for episode in between_turns.values())
        while room > 0 and (plays := [play for play, waiting in self.waiting.items() if waiting]):
            play = min(plays, key=count.__getitem__)
            number = next(iter(self.waiting[play]))
            self.begin(number, play, *self.waiting[play].pop(number))
            count[play] += 1
            room -= 1
        self.ran, self.ran_before, self.next_round = set(), self.ran, None
        self.begin_soon(ROUND_S)

    def begin(self, number: int, play: str, row: bytes, max_new_tokens: int) -> None:
        try:
            self.running[number] = RunningEpisode(self, number, play, row, max_new_tokens)
            self.ran.add(number)
        except BaseException as error:  # no memory, for one
            self.send_end(number, 0, "stop", exception_verdict("the episode cannot begin", error, ()), [], [])

    def drop(self, number: int) -> None:
        if episode := self.running.get(number):
            return episode.drop()
        for waiting in self.waiting.values():
            waiting.pop(number, None)
        self.send(dropped=number)

    def end(self, number: int, finish: str, verdict: Verdict | None, messages: list[Any], scores: list[Any]) -> None:
        turns = len(self.running.pop(number).ask.replies)
        self.send_end(number, turns, finish, verdict, messages, scores)

    def send_end(
        self, number: int, turns: int, finish: str, verdict: Verdict | None, messages: list[Any], scores: list[Any]
    ) -> None:
        try:
            given = verdict and dataclasses.asdict(verdict)
            self.send(end=number, turns=turns, finish=finish, verdict=given, messages=messages, turn_scores=scores)
        except BaseException as error:  # a message may hold anything, and what it holds may raise anything
            verdict = exception_verdict("the messages of the episode cannot be sent", error, ())
            given = dataclasses.asdict(verdict)
            self.send(end=number, turns=turns, finish=finish, verdict=given, messages=[], turn_scores=[])
        if verdict and verdict.failure == "memory":
            self.retire("it ran out of memory")
        elif self.threads.are_lost(self.running):
            self.retire("steps or tools that do not end keep its threads")

    def retire(self, reason: str) -> None:
        self.send(retire=reason)
        self.flush()


class RunningEpisode:
    """One episode: its task, the turn it waits for, and the time it has between two turns."""

    def __init__(self, server: EpisodeServer, number: int, play: str, row: bytes, max_new_tokens: int):
        self.server, self.number, self.play, self.row = server, number, play, row
        self.player, self.settings, self.loop = server.players[play], server.settings, server.loop
        self.turn: asyncio.Future[Turn] | None = None
        self.observation: list[int] = []
        self.outside_s = 0.0  # spent between turns so far
        self.dropped = False
        self.timed_out = 0.0
        s = self.settings
        limits = Limits(s.max_turns, max_new_tokens, s.max_tokens, s.window)
        self.ask = EpisodeAsk(self.player.new_conversation(), limits, self.sample, self.player.read_reply)
        self.task = EpisodeTask(self.run(), number, self.loop)

    def begin_step(self) -> None:
        self.step_began = self.loop.time()
        seconds = min(self.settings.step_timeout_s, self.settings.timeout_s - self.outside_s)
        self.timer = self.loop.call_later(max(seconds, 0), self.time_out, seconds)

    def end_step(self) -> None:
        self.timer.cancel()
        self.outside_s += self.loop.time() - self.step_began

    def time_out(self, seconds: float) -> None:
        self.timed_out = max(seconds, 1e-9)
        self.ask.closed = True
        self.server.send(late=self.number)
        self.task.cancel()

    async def sample(self, observation: list[int], max_tokens: int) -> Turn:
        """Asks the runner for a turn."""
        self.end_step()
        self.observation, self.turn = observation, self.loop.create_future()
        self.server.send(ask=self.number, observation=observation, max_tokens=max_tokens)
        try:
            return await self.turn
        finally:
            self.turn = None

    def resume(self, tokens: list[int], logprobs: list[float], finish: str) -> None:
        if self.turn and not self.turn.done():
            self.begin_step()
            self.turn.set_result(Turn(self.observation, tokens, logprobs, finish))

    def drop(self) -> None:
        self.dropped = self.ask.closed = True
        self.task.add_done_callback(self.on_dropped)
        self.task.cancel()

    def on_dropped(self, _: asyncio.Task[Any]) -> None:
        self.server.running.pop(self.number, None)
        self.server.send(dropped=self.number)

    async def run(self) -> None:
        verdict: Verdict | None
        EPISODE.set(self.number)
        self.begin_step()
        try:
            returned = await run_announced(self.run_function(), partial(self.server.announce, self.number))
            verdict = self.player.read_verdict(returned, self.ask)
        except EpisodeOver:
            verdict = self.player.read_verdict(None, self.ask)
        except asyncio.CancelledError:
            verdict = self.player.error_verdict(RuntimeError("it cancelled its own task"), self.ask)
        except BaseException as error:  # SystemExit too: a user's function must not end the process unnoticed
            verdict = self.player.error_verdict(error, self.ask)
        if self.timed_out:  # whatever the function made of its cancellation
            verdict = self.timeout_verdict()
        self.ask.closed = True
        self.timer.cancel()
        if not self.dropped:
            self.server.end(
                self.number, self.ask.finish, verdict, self.player.transcript(self.ask), self.ask.turn_scores
            )

    async def run_function(self) -> Any:
        return await self.player.play(pickle.loads(self.row), self.ask)

    def timeout_verdict(self) -> Verdict:
        self.ask.over = "time"
        whole = self.timed_out < self.settings.step_timeout_s
        option, limit = ("timeout_s", self.settings.timeout_s) if whole else ("step_timeout_s", self.timed_out)
        detail = f"{self.player.describe_moment(self.ask)} took more than {limit:g} s (episode.{option})"
        return Verdict(None, failure="timeout", detail=detail)


class EpisodeTask(asyncio.Task[Any]):
    """A task that code of another episode cannot cancel, as by `for task in asyncio.all_tasks(): task.cancel()`."""

    def __init__(self, coroutine: Any, number: int | None, loop: asyncio.AbstractEventLoop, **options: Any):
        super().__init__(coroutine, loop=loop, **options)
        self.number = number  # of its episode; None: of all

    def cancel(self, msg: Any = None) -> bool:
        canceller = EPISODE.get(None)
        if canceller is not None and self.number not in (None, canceller):
            return False
        return super().cancel(msg)


class Announced:
    """Awaits a coroutine, and calls `announce` each time before its code runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], announce: Callable[[], None]):
        self.coroutine, self.announce = coroutine, announce

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self.coroutine.send
        value: Any = None
        while True:
            self.announce()
            try:
                waiting = resume(value)
            except StopIteration as end:
                return end.value
            try:
                resume, value = self.coroutine.send, (yield waiting)
            except BaseException as error:  # it is cancelled
                resume, value = self.coroutine.throw, error


async def run_announced(coroutine: Coroutine[Any, Any, Any], announce: Callable[[], None]) -> Any:
    return await Announced(coroutine, announce)


async def equip(settings: EpisodeSettings) -> Equipment:
    """Loads the tokenizer, the tools and the parsers. The parser of tool calls is by default that of the model."""
    from workers.rollout.reply_formats import make_reply_parser

    with contextlib.nullcontext() if settings.trust_remote_code else skip_generation_import():
        from transformers import AutoConfig, AutoTokenizer

    options = {"trust_remote_code": settings.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(settings.model, **options)
    template_text = read_template(settings.template) if settings.template else ""
    model = AutoConfig.from_pretrained(settings.model, **options)
    vocabulary = model.get_text_config().vocab_size
    template = ConversationTemplate(tokenizer, settings.template_options, template_text, vocabulary)
    toolbox = Toolbox(settings.tools)
    schemas = await toolbox.schemas()
    tool_parser = settings.tool_parser
    if schemas and not tool_parser:
        tool_parser = suggest_tool_parser(model.to_dict(), template.chat_template)
        if not tool_parser:
            raise ConfigError(
                f"episode.tool_parser: {settings.model} is of no family whose calls are known. Name the parser that "
                f"reads them: {', '.join(known_tool_parsers())}."
            )
    parser = make_reply_parser(tokenizer, tool_parser, settings.reasoning_parser, schemas, settings.template_options)
    return Equipment(template, parser, toolbox, schemas)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Reads a message as a multiprocessing.Connection writes it."""
    [size] = struct.unpack("!i", await reader.readexactly(4))
    if size == -1:
        [size] = struct.unpack("!Q", await reader.readexactly(8))
    return await reader.readexactly(size)


def main(fd: int, parent: int) -> None:
    run_child(fd, parent, lambda c, settings: EpisodeServer(c, settings).serve, doing="loading the episode's functions")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
