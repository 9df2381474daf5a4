"""Reads the calls of FunctionGemma: `<start_function_call>call:pay{to:<escape>Ann<escape>,sum:3}<end_function_call>`.

vLLM's parser sees texts alone. It drops numbers, takes the text `3` for one, and takes objects apart.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from rlsys.episodes.parsing import FormatParser, RawCall, ReplyParts

CALL = re.compile(r"<start_function_call>call:([\w.-]+)(\{.*?\})<end_function_call>", re.DOTALL)
KEY = re.compile(r"([{,]\s*)([\w.-]+):")


class FunctionGemmaParser:
    """Takes text and reasoning from vLLM's parser, and reads the calls itself."""

    def __init__(self, parser: FormatParser):
        self.parser = parser

    def __call__(self, text: str, tokens: Sequence[int]) -> ReplyParts:
        parts = self.parser(text, tokens)
        _, _, written = text.rpartition(parts.reasoning) if parts.reasoning else ("", "", text)
        calls = [RawCall(name, arguments_as_json(arguments), "") for name, arguments in CALL.findall(written)]
        return replace(parts, calls=calls)


def arguments_as_json(arguments: str) -> str:
    """`{a:1,b:<escape>x<escape>}` → `{"a":1,"b":"x"}`"""
    pieces = arguments.split("<escape>")
    pieces[::2] = [KEY.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return "".join(pieces)
