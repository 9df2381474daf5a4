"""Reads the calls of FunctionGemma: `<start_function_call>call:pay{to:<escape>Ann<escape>,sum:3}<end_function_call>`.

vLLM's parser sees texts alone. It drops numbers, takes the text `3` for one, and takes objects apart.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from rlsys.episodes.parsing import FormatParser, RawCall, ReplyParts

CALL = re.compile(r"<start_function_call>(?:call:)?(.*?)<end_function_call>", re.DOTALL)
KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:][^"{}\[\],:]*):')
NONE = re.compile(r"(?<=[:\[,])None(?=[,}\]])")  # as the template writes null


class FunctionGemmaParser:
    """Takes text and reasoning from vLLM's parser, and reads the calls itself."""

    def __init__(self, parser: FormatParser):
        self.parser = parser

    def __call__(self, text: str, tokens: Sequence[int]) -> ReplyParts:
        parts = self.parser(text, tokens)
        _, _, written = text.rpartition(parts.reasoning) if parts.reasoning else ("", "", text)
        calls = [call.partition("{") for call in CALL.findall(written)]
        raw_calls = [RawCall(name.strip(), arguments_as_json(brace + rest), "") for name, brace, rest in calls]
        return replace(parts, calls=raw_calls)


def arguments_as_json(arguments: str) -> str:
    """`{a:1,b:<escape>x<escape>}` → `{"a":1,"b":"x"}`. What is written otherwise becomes no valid JSON."""
    pieces = (arguments or "?").split("<escape>")
    pieces[::2] = [NONE.sub("null", KEY.sub(r'\1"\2":', piece)) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return "".join(pieces)
