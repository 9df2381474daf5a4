"""The process that plays episodes. `workers.episodes.runner` starts it, sends it rows and turns, and replaces it.

    runner ──pickle [("start", number, play, pickled row, max_new_tokens, sampling), …]──▶ process
           ──pickle [("turn", number, ask, tokens, logprobs, finish), …]──▶
           ──pickle [("drop", number), …]──▶
           ◀── {"ready": true, "notes": […]}, or {"problem": sentence}   once, when the functions are imported
           ◀── {"on": number}                        code of this episode runs from now on
           ◀── {"ask": number, "turn": ask, "observation": […], "after": ask that it continues, "max_tokens": n, …}
           ◀── {"late": number}                      its time is over, and it has been cancelled
           ◀── {"dropped": number}                   it has been dropped, and nothing of it runs any more
           ◀── {"end": number, "turns": asks in order, "finish": …, "verdict": …, "messages": …, "turn_scores": …}
           ◀── {"retire": reason}                    it wants to be replaced; its other episodes are played again

All episodes, and the tasks that they start, run in one event loop in the main thread, where the code of each delays all
others. So an episode begins only while few others run; one that waits, as for a page of the web, holds up none. Answers are
JSON: nothing that a user's function sends is unpickled. Users' functions are limited as described in `workers.reward.process`.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import json
import os
import pickle
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlsys.data.render import read_template
from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.asking import EpisodeAsk, Limits, Turn, TurnRequest
from rlsys.episodes.conversation import ConversationTemplate, continuation_notes
from rlsys.episodes.formats import known_tool_parsers, suggest_tool_parser
from rlsys.episodes.parsing import ReplyParser
from rlsys.episodes.player import Equipment, Player
from rlsys.episodes.session import Session
from rlsys.episodes.settings import EpisodeSettings
from rlsys.episodes.tools import Toolbox
from rlsys.errors import ConfigError
from rlsys.models.end_ids import model_end_ids
from rlsys.rewards.weighted_reward import exception_verdict
from rlsys.types import Floats, Ints, Verdict
from workers.episodes.step_threads import EPISODE, StepThreads
from workers.processes.child import close_in_children, run_child
from workers.start.imports import skip_generation_import, vllm_on_cpu

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
        self.gateway = None
        if any(player.takes_session for player in self.players.values()):
            with vllm_on_cpu():
                from workers.episodes.gateway import Gateway

            self.gateway = Gateway(settings, equipment.template.chat_template, equipment.tool_parser)
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
        if self.gateway:
            serving = EpisodeTask(self.gateway.serve(), SERVER, self.loop)
            serving.add_done_callback(lambda ended: ended.result())
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
        """Begins episodes while there is room, each of the play that has the fewest between two turns."""
        between_turns = {number: episode for number, episode in self.running.items() if not episode.waiting}
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

    def begin(self, number: int, play: str, *start: Any) -> None:
        try:
            self.running[number] = RunningEpisode(self, number, play, *start)
            self.ran.add(number)
        except BaseException as error:  # no memory, for one
            self.send_end(number, [], "stop", exception_verdict("the episode cannot begin", error, ()), [], [])

    def drop(self, number: int) -> None:
        if episode := self.running.get(number):
            return episode.drop()
        for waiting in self.waiting.values():
            waiting.pop(number, None)
        self.send(dropped=number)

    def end(self, number: int, finish: str, verdict: Verdict | None, messages: list[Any], scores: list[Any]) -> None:
        turns = [turn.number for turn in self.running.pop(number).ask.in_order]
        self.send_end(number, turns, finish, verdict, messages, scores)

    def send_end(
        self,
        number: int,
        turns: list[int],
        finish: str,
        verdict: Verdict | None,
        messages: list[Any],
        scores: list[Any],
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

    def __init__(
        self,
        server: EpisodeServer,
        number: int,
        play: str,
        row: bytes,
        max_new_tokens: int,
        sampling: dict[str, float],
    ):
        self.server, self.number, self.play, self.row = server, number, play, row
        self.player, self.settings, self.loop = server.players[play], server.settings, server.loop
        self.waiting: dict[int, asyncio.Future[Turn]] = {}  # by ask
        self.outside_s = 0.0  # spent between turns so far
        self.dropped = False
        self.timed_out = 0.0
        s = self.settings
        limits = Limits(s.max_turns, max_new_tokens, s.max_tokens, s.window)
        player = self.player
        given = (player.new_conversation, limits, self.sample, player.read_reply, player.equipment.schemas)
        self.session = Session(*given) if player.takes_session else None  # what programs ask
        self.ask = self.session or EpisodeAsk(*given)
        if self.session and server.gateway:
            self.session.sampling = sampling
            server.gateway.open(number, self.session)
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

    async def sample(self, asked: TurnRequest) -> Turn:
        """Asks the runner for a turn."""
        if not self.waiting:
            self.end_step()
        turn = self.waiting[asked.turn] = self.loop.create_future()
        self.server.send(ask=self.number, **vars(asked))
        try:
            return await turn
        finally:
            self.waiting.pop(asked.turn, None)

    def resume(self, number: int, tokens: Ints, logprobs: Floats | None, finish: str) -> None:
        turn = self.waiting.pop(number, None)
        if turn and not turn.done():
            if not self.waiting:
                self.begin_step()
            values = None if logprobs is None else logprobs.tolist()
            turn.set_result(Turn(tokens.tolist(), values, finish))

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
        self.end_requests()
        if not self.dropped:
            self.server.end(
                self.number, self.ask.finish, verdict, self.player.transcript(self.ask), self.ask.turn_scores
            )

    async def run_function(self) -> Any:
        try:
            return await self.player.play(pickle.loads(self.row), self.ask)
        except Exception as error:
            if self.session and self.session.over:  # what its client makes of the refusal
                raise EpisodeOver(self.session.over) from error
            raise

    def end_requests(self) -> None:
        """Ends what programs still ask for."""
        if self.session and self.server.gateway:
            self.server.gateway.close(self.session)
            for turn in self.waiting.values():
                turn.cancel()

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


def preload(settings: EpisodeSettings) -> None:
    """Imports what `equip` needs, once for all processes that are forked."""
    with skip_generation_import():
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    serves = any(map(may_serve, settings.plays))
    if serves or settings.tools or settings.tool_parser or settings.reasoning_parser:
        with vllm_on_cpu():
            import vllm.entrypoints.openai.chat_completion.protocol
            import vllm.tokenizers.hf  # noqa: F401
    if serves:
        import workers.episodes.gateway  # noqa: F401


def may_serve(play: str) -> bool:
    """Guesses whether programs ask the model: then the imports of a web server are needed. Runs none of the user's code."""
    file = Path(play.rpartition(":")[0]).expanduser()
    return play == "command" or (file.suffix == ".py" and file.is_file() and b"session" in file.read_bytes())


async def equip(settings: EpisodeSettings) -> Equipment:
    """Loads the tokenizer, the tools and the parsers. The parser of tool calls is by default that of the model."""
    from transformers import AutoConfig, AutoTokenizer

    from workers.rollout.reply_formats import make_reply_parser

    options = {"trust_remote_code": settings.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(settings.model, **options)
    template_text = read_template(settings.template) if settings.template else ""
    model = AutoConfig.from_pretrained(settings.model, **options)
    vocabulary = model.get_text_config().vocab_size
    template = ConversationTemplate(tokenizer, settings.template_options, template_text, vocabulary)
    toolbox = Toolbox(settings.tools)
    schemas = await toolbox.schemas()
    of_programs = settings.tool_parser or suggest_tool_parser(model.to_dict(), template.chat_template)
    tool_parser = settings.tool_parser
    if schemas and not tool_parser:
        tool_parser = of_programs
        if not tool_parser:
            raise ConfigError(
                f"episode.tool_parser: {settings.model} is of no family whose calls are known. Name the parser that "
                f"reads them: {', '.join(known_tool_parsers())}."
            )

    @functools.lru_cache(maxsize=64)
    def read_with(tools: str, tool_parser: str) -> ReplyParser:
        reasoning, options = settings.reasoning_parser, settings.template_options
        return make_reply_parser(tokenizer, tool_parser, reasoning, json.loads(tools), options)

    def reader(tools: Sequence[dict[str, Any]]) -> ReplyParser:
        known = list(tools) == schemas
        return read_with(json.dumps(tools), tool_parser if known else of_programs if tools else "")

    reader(schemas)
    return Equipment(template, reader, toolbox, schemas, of_programs)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Reads a message as a multiprocessing.Connection writes it."""
    [size] = struct.unpack("!i", await reader.readexactly(4))
    if size == -1:
        [size] = struct.unpack("!Q", await reader.readexactly(8))
    return await reader.readexactly(size)


def main(fd: int, parent: int) -> None:
    run_child(fd, parent, lambda c, settings: EpisodeServer(c, settings).serve, doing="loading the episode's functions")
