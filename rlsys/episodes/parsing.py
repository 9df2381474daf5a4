"""From the tokens of a reply to its text, reasoning and calls.

tokens ─▶ raw text ─▶ a parser of the model's format, if one is named ─▶ reasoning, text, calls
                                                                         └─▶ checked against the tools' schemas
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from rlsys.episodes.ask import Reply, ToolCall
from rlsys.episodes.call_ends import find_whole_calls
from rlsys.episodes.calls import CUT, UNREADABLE, CallReader, Schema

# How calls begin in the formats of known models. An answer with one, of which no parser makes a call, has a broken call.
CALL_MARKERS = (
    *("<tool_call>", "<|tool_call>", "<|tool_call|>", "<|tool_call_start|>", "<|tool_calls_section_begin|>"),
    *("<|tool_call_begin|>", "<invoke ", "<tool_calls>", "<|tools_prefix|>", "<longcat_tool_call>"),
    *("[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|python_tag|>", "<function=", "functools["),
    *("<function_calls>", "<start_function_call>", "<seed:tool_call>", "<minimax:tool_call>", "to=functions."),
    *("<function name=", "<function_call>", "<|function_call|>", "function call<|role_sep|>", "<dots_function_call>"),
    *(
        "<｜DSML｜invoke ",
        "<｜DSML｜ invoke ",
        "<ifm|tool_call>",
        "<|open|>call",
        "<atem:invoke ",
        "<｜tool_call_begin｜>",
    ),
    *("<|plamo:begin_tool_request:plamo|>", "<|content_invoke_tool_json|>", "<|action_start|>", "<|START_ACTION|>"),
)
# Formats without a mark: a call is the whole answer.
BARE_CALLS = {"json": r'[\s;]*\{\s*"(name|function|parameters|arguments)"', "pythonic": r"\s*\[\s*\w+\("}


@dataclass(frozen=True)
class RawCall:
    """A call as a parser gives it. RawCall("add", '{"a": 1}', "")"""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class ReplyParts:
    text: str = ""
    reasoning: str = ""
    calls: list[RawCall] = field(default_factory=list)


class FormatParser(Protocol):
    """Takes the parts of a reply from its text and tokens, in the format of a model."""

    def __call__(self, text: str, tokens: Sequence[int]) -> ReplyParts: ...


class ReplyParser:
    """Makes replies of tokens. Without a parser of a format, a reply is text alone."""

    def __init__(
        self, tokenizer: Any, parser: FormatParser | None = None, tools: Sequence[Schema] = (), tool_parser: str = ""
    ):
        self.tokenizer, self.parser = tokenizer, parser
        self.read_call = CallReader(tools)
        self.tool_parser = tool_parser
        self.takes_calls = bool(tools) and bool(tool_parser)
        self.bare_call = next((pattern for word, pattern in BARE_CALLS.items() if word in tool_parser), None)
        self.special_tokens = {n: t.content for n, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_tokens.setdefault(tokenizer.eos_token_id, tokenizer.eos_token)

    def parse(self, tokens: Sequence[int], finish: str, turn: int = 0, logprobs: list[float] | None = None) -> Reply:
        raw = self.tokenizer.decode(tokens, skip_special_tokens=False)
        reply = Reply(raw, finish, list(tokens), logprobs, raw=raw)
        ended = finish == "stop" and len(tokens) > 0 and tokens[-1] in self.special_tokens
        text = raw.removesuffix(self.special_tokens[tokens[-1]]) if ended else raw
        parts = self.parser(text, tokens) if self.parser else ReplyParts(text)
        reply.text, reply.reasoning = self.strip_special_tokens(parts.text), parts.reasoning
        if self.takes_calls:
            written = written_text(parts, raw)
            whole, begins_more = parts.calls, False
            if not ended:
                whole, begins_more = self.split_calls(parts.calls, written, raw, tokens, finish)
            reply.calls = self.read_calls(whole, raw, turn)
            if begins_more or (not whole and self.begins_call(written)):
                error = CUT if finish == "length" else UNREADABLE
                reply.calls.append(ToolCall("", {}, call_id(turn, len(whole)), error))
        return reply

    def split_calls(
        self, calls: list[RawCall], written: str, raw: str, tokens: Sequence[int], finish: str
    ) -> tuple[list[RawCall], bool]:
        """Returns the whole calls of an answer that was stopped, and whether another call begins behind them.

        A call is whole if the parser sees the same one in what is written up to the end of the last whole call, or if
        it sees none at all because of a call that is not whole.
        """
        ends = find_whole_calls(written, self.tool_parser, finish)
        if ends is None:
            whole = calls[:-1] if finish == "length" else calls
            return whole, len(whole) < len(calls)
        rest = written[ends.length :]
        begins_more = ends.begins_another or self.begins_call(rest)
        whole = self.parse_beginning(raw, len(raw) - len(rest), ends.missing, tokens)
        if calls or not (begins_more or (ends.missing and not rest.strip())):
            pairs = takewhile(is_same_call, zip(calls, whole, strict=False))
            whole = [call for call, _ in pairs]
        return whole, len(whole) < len(calls) or (bool(whole) and begins_more)

    def parse_beginning(self, raw: str, end: int, missing: str, tokens: Sequence[int]) -> list[RawCall]:
        """Returns the calls of `raw[:end] + missing`."""
        if not self.parser:
            return []
        count = bisect_left(range(len(tokens)), end, key=lambda n: len(self.tokenizer.decode(tokens[:n])))
        more = self.tokenizer(missing, add_special_tokens=False)["input_ids"] if missing else []
        return self.parser(raw[:end] + missing, [*tokens[:count], *more]).calls

    def read_calls(self, calls: Sequence[RawCall], raw: str, turn: int) -> list[ToolCall]:
        return [
            self.read_call(call.name, call.arguments, call.id if call.id in raw and call.id else call_id(turn, n))
            for n, call in enumerate(calls)
        ]

    def begins_call(self, text: str) -> bool:
        return any(marker in text for marker in CALL_MARKERS) or bool(self.bare_call and re.match(self.bare_call, text))

    def strip_special_tokens(self, text: str) -> str:
        for token in self.special_tokens.values():
            text = text.replace(token, "") if token else text
        return text


def is_same_call(pair: tuple[RawCall, RawCall]) -> bool:
    return (pair[0].name, pair[0].arguments) == (pair[1].name, pair[1].arguments)


def written_text(parts: ReplyParts, raw: str) -> str:
    """Returns what follows the reasoning."""
    return raw[max(raw.find(parts.reasoning), 0) + len(parts.reasoning) :] if parts.reasoning in raw else raw


def call_id(turn: int, number: int) -> str:
    """Returns the id of a call: nine letters and digits, as Mistral's templates want, and the same in every run."""
    return f"call{turn % 1000:03}{number % 100:02}"
