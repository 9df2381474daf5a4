"""Finds where the calls of an unfinished answer end: many parsers make a call of half a one."""

import re

from rlsys.episodes.formats import BRACKETS, CALL_ENDS

# A tag such as [ARGS], an escaped character, a bracket, or a quotation mark.
SYNTAX = re.compile(r"\[[A-Z_]+\]|\\.|[][{}\"']", re.DOTALL)


def calls_end(text: str, tool_parser: str) -> int | None:
    """Returns the length of the text up to the end of its last whole call. None: nobody knows what ends a call."""
    end = CALL_ENDS.get(tool_parser)
    if end is None or end == BRACKETS:
        return None if end is None else brackets_end(text)
    return max((match.end() for match in re.finditer(r"\s*".join(map(re.escape, end.split())), text)), default=0)


def brackets_end(text: str) -> int:
    """Returns the length up to the last bracket that closes all open ones. Brackets in quoted texts do not count."""
    depth, end, quote = 0, 0, ""
    for token in SYNTAX.finditer(text):
        mark = token[0]
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "[{":
            depth += 1
        elif depth and mark in "]}":
            depth -= 1
            end = end if depth else token.end()
        elif depth and mark in "\"'":
            quote = mark
    return end
