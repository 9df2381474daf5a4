"""An episode as a program sees it: a model behind a web address. Each request is an ask, wherever in the episode it goes on.

    request: system, user, assistant, tool, …  ──find──▶ the longest held turn that it begins with, and what is new
                                               ──answer─▶ the turn, sampled once however often it is asked for

A program sends the whole conversation each time, as texts. What the model wrote is found again by its text, and stays as it
was sampled. A conversation that was changed, as by a summary, goes on from the last turn that it still has, or begins anew.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rlsys.episodes.ask import EpisodeOver, Message, Reply
from rlsys.episodes.asking import EpisodeAsk, HeldTurn, Question, Turn
from rlsys.episodes.template import TemplateError
from rlsys.seeds import derive_seed

MODEL = "policy"  # its name


class Session(EpisodeAsk):
    """`openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key)`, or `await session("higher")`: it is an `Ask`, too."""

    model = MODEL
    address = key = ""  # of the web server, and of this episode there

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.answers: dict[Any, asyncio.Task[HeldTurn]] = {}  # by what was asked
        self.forms: dict[HeldTurn, list[Any]] = {}  # of the conversation up to a turn, to compare it with
        self.sampling: dict[str, float] = {}  # how the run samples turns

    @property
    def openai_url(self) -> str:
        return f"{self.address}/v1"

    @property
    def anthropic_url(self) -> str:
        return self.address

    @property
    def variables(self) -> dict[str, str]:
        """Where programs look for an address and a key."""
        openai = {"OPENAI_BASE_URL": self.openai_url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": self.model}
        anthropic = {"ANTHROPIC_BASE_URL": self.anthropic_url, "ANTHROPIC_API_KEY": self.key}
        return openai | anthropic | {"ANTHROPIC_MODEL": self.model}

    def find(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> Question:
        """Returns what a request asks, behind the longest conversation that it goes on with."""
        forms = [comparable(message) for message in messages]
        held = [turn for turn in self.turns if self.is_beginning(turn, forms, tools)]
        held.sort(key=lambda turn: (len(turn.question.conversation.messages), has_ids(turn, messages)), reverse=True)
        for turn in held:
            try:
                question = self.pose(turn, messages[len(turn.question.conversation.messages) :])
                break
            except TemplateError:  # as for an answer that the program wrote itself
                continue
        else:
            question = self.pose(None, messages, tools)
        if self.turns:  # before, replies are examples
            question.new_messages = [mark_unknown(message) for message in question.new_messages]
        return question

    def is_beginning(self, turn: HeldTurn, forms: list[Any], tools: Sequence[dict[str, Any]]) -> bool:
        """Returns whether a request goes on with the conversation up to this turn."""
        conversation = turn.question.conversation
        if turn not in self.forms:
            self.forms[turn] = [comparable(message) for message in conversation.messages]
        known = self.forms[turn]
        return len(known) < len(forms) and list(conversation.tools) == list(tools) and forms[: len(known)] == known

    async def answer(self, question: Question, max_tokens: int, stop: Sequence[str] = ()) -> HeldTurn:
        """Has a question answered once: a program that asks again, as after a lost connection, gets the same turn."""
        what = tuple(self.tokens(question)), max_tokens, tuple(stop)
        if what not in self.answers:
            if self.closed:
                raise EpisodeOver("time")
            self.require_turns_left()
            room = min(self.room_for(question), max_tokens)
            prefix = derive_seed(*what[0], "", max_tokens, *stop) or 1
            # With log-probs, which it may want when it asks again.
            turn = self.take_turn(self.count_ask(), question, room, stop, prefix, logprobs=True)
            self.answers[what] = asyncio.ensure_future(turn)
            self.answers[what].add_done_callback(look_at)
        return await asyncio.shield(self.answers[what])

    def read(self, turn: Turn, number: int, question: Question, stop: Sequence[str]) -> Reply:
        """Reads a turn as a program gets it: text up to a stop string, and calls that can be read, or else all as text."""
        reply = super().read(turn, number, question, stop)
        readable = [call for call in reply.calls if call.arguments or not call.error]
        if reply.calls and not readable:
            reply = self.read_reply(turn, number, ())
        reply.calls = readable
        for string in stop:
            reply.text = reply.text.partition(string)[0]
        return reply

    def require_turns_left(self) -> None:
        """Lets a program go on with a shorter conversation than one that was too long."""
        if self.over == "window":
            self.over = ""
        super().require_turns_left()

    def tokens(self, question: Question) -> list[int]:
        """Returns all tokens up to the answer."""
        parts = [question.observation]
        while before := question.earlier:
            parts += [before.turn.tokens, before.question.observation]
            question = before.question
        return [token for part in reversed(parts) for token in part]

    @property
    def in_order(self) -> list[HeldTurn]:
        """In an order that does not depend on which of several requests came first."""
        return sorted(self.turns, key=lambda turn: self.tokens(turn.question) + turn.turn.tokens)


def mark_unknown(message: Message) -> Message:
    return message | {"unknown": True} if message["role"] == "assistant" else message


def look_at(task: "asyncio.Task[HeldTurn]") -> None:
    """Takes its error, which nobody may wait for any more."""
    if not task.cancelled():
        task.exception()


def comparable(message: Message) -> tuple[Any, ...]:
    """Returns what programs keep of a message: neither spaces around it, nor reasoning, nor the form of arguments."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [(call["name"], canonical(call.get("arguments"))) for call in calls]
    return message["role"], (message.get("content") or "").strip(), tuple(arguments)


def canonical(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return json.dumps(arguments or {}, sort_keys=True)


def has_ids(turn: HeldTurn, messages: list[Message]) -> bool:
    """Returns whether the calls of this turn, whose text another turn may have as well, have its ids."""
    known = turn.question.conversation.messages
    return call_ids(known[-1]) == call_ids(messages[len(known) - 1])


def call_ids(message: Message) -> list[str]:
    return [call.get("id", "") for call in message.get("tool_calls") or ()]
