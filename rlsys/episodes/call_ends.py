"""Finds where the calls of an unfinished answer end: many parsers make a call of half a one, or none of a whole one."""

import re
from dataclasses import dataclass

from rlsys.episodes.formats import CALL_ENDS, Brackets

# A tag such as [ARGS], an escaped character, a bracket, or a quotation mark.
SYNTAX = re.compile(r"\[[A-Z_]+\]|\\.|[][{}()\"']", re.DOTALL)
# What must stand before an end that is not complete: values of arguments may contain the end alone.
BEFORE_END = re.compile(r"(</parameter>|<function=[^<>]*>)\s*$")


@dataclass(frozen=True)
class WholeCalls:
    """What is written up to the end of the last whole call. WholeCalls(112, "\\n</tool_call>", begins_another=False)"""

    length: int
    missing: str = ""  # marks that the parser wants behind it
    begins_another: bool = False  # behind it a call begins in the same list, or in its own brackets


@dataclass(frozen=True)
class Value:
    """An object or a list in brackets. One that is not closed ends behind its last whole call, if it is a list."""

    begin: int
    end: int
    closed: bool


def find_whole_calls(text: str, tool_parser: str, finish: str) -> WholeCalls | None:
    """Finds the last whole call of a text that no token of the model ended. None: nobody knows what ends a call."""
    end = CALL_ENDS.get(tool_parser)
    if isinstance(end, Brackets):
        return whole_brackets(text, end)
    return None if end is None else whole_marks(text, finish, *end.split("\n"))


def whole_marks(text: str, finish: str, mark: str, close: str = "") -> WholeCalls:
    """Finds the calls up to the last `mark`. A stop string, such as `mark` itself, may keep a part of `close` back."""
    before, found, after = text.rpartition(mark)
    if (
        finish == "stop"
        and found
        and close.startswith(after.strip())
        and after.strip() != close
        and BEFORE_END.search(before)
    ):
        return WholeCalls(len(text.rstrip()), close.removeprefix(after.strip()))
    pattern = rf"{re.escape(mark)}\s*{re.escape(close)}"
    return WholeCalls(max((match.end() for match in re.finditer(pattern, text)), default=0))


def whole_brackets(text: str, form: Brackets) -> WholeCalls:
    length, missing, position = 0, "", 0
    while mark := re.compile(form.mark).search(text, position):
        value = read_value(text, mark.end(), form.opening)
        if value is None:
            break
        if not value.closed:
            if value.end > value.begin and form.close is not None:
                length, missing = value.end, "]" + form.close
            is_next = bool(form.mark) or not text[length : value.begin].strip("; \n")
            return WholeCalls(length, missing, is_next and bool(text[length:].strip()))
        close = re.compile(rf"\s*{re.escape(form.close or '')}").match(text, value.end)
        position = length = close.end() if close and form.close else value.end
        missing = "" if close else form.close or ""
        if not form.mark and form.opening == "[":
            break  # such a list is the whole answer
    return WholeCalls(length, missing)


def read_value(text: str, start: int, opening: str) -> Value | None:
    """Finds the first value that one of the opening brackets begins. Brackets in quoted texts do not count."""
    begin, end, depth, quote = -1, -1, 0, ""
    for token in SYNTAX.finditer(text, start):
        mark = token[0]
        if quote:
            quote = "" if mark == quote else quote
        elif not depth:
            if mark in opening:
                begin = end = token.start()
                depth = 1
        elif mark in "[{(":
            depth += 1
        elif mark in "\"'":
            quote = mark
        elif mark in "]})":
            depth -= 1
            if depth == 0:
                return Value(begin, token.end(), closed=True)
            if depth == 1 and text[begin] == "[":
                end = token.end()
    return Value(begin, end, closed=False) if depth else None
