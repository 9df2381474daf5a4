"""Reads JSON: lines, compressed lines, and whole files."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.data.readers.rows import BadRow, DataRow, has_bad_bytes

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json_lines(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    with file.open("rb") as lines:
        yield from parse_lines(lines, name)


def read_gzipped_lines(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    yield from read_compressed(partial(gzip.GzipFile, file), name)


def read_zstandard_lines(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    import pyarrow

    yield from read_compressed(lambda: io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd")), name)


def read_compressed(open_file: Callable[[], io.BufferedIOBase], name: str) -> Iterator[DataRow | BadRow]:
    """Yields the rows of a compressed file. If its end is missing, yields the rows before that.

    A file that is damaged inside is left out: its checksum is at its end, and damaged data may look like rows.
    """
    problem = ""
    try:
        with open_file() as stream:
            while stream.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        problem = str(error).rstrip(".")
        if not isinstance(error, EOFError) and "Truncated" not in problem:
            yield BadRow(name, 1, "damaged file", f"the compressed file is damaged: {problem}.")
            return
    line = 0
    try:
        with open_file() as stream:
            for row in parse_lines(stream, name):
                line = row.line
                yield row
    except (EOFError, OSError):
        yield BadRow(name, line + 1, "damaged file", f"the compressed file is cut off here: {problem}.")


def parse_lines(lines: Iterable[bytes], name: str) -> Iterator[DataRow | BadRow]:
    for line, text in enumerate(lines, 1):
        text = text.removeprefix(BYTE_ORDER_MARK) if line == 1 else text
        if text.strip():
            yield parse_line(text, name, line)


def parse_line(text: bytes, name: str, line: int) -> DataRow | BadRow:
    try:
        return to_row(json.loads(text.decode().rstrip("\r\n")), name, line)
    except json.JSONDecodeError as error:
        return BadRow(name, line, "not JSON", f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}.")
    except UnicodeDecodeError as error:
        return BadRow(name, line, "not UTF-8", f"not UTF-8: {error.reason} at byte {error.start + 1}.")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        return BadRow(name, line, "not JSON", f"not JSON that can be read: {error}.")


def to_row(value: Any, name: str, line: int) -> DataRow | BadRow:
    if isinstance(value, dict):
        return DataRow(name, line, value)
    text = json.dumps(value, ensure_ascii=False)[:60]
    return BadRow(name, line, "not an object", f'a row is an object such as {{"prompt": "…"}}; this one is {text}.')


def read_json(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """Reads an array of objects, {"data": [objects]}, one object, or JSON lines in a file that is called .json."""
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    if text.lstrip().startswith("["):
        yield from parse_array(text, name)
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line.encode(errors="surrogateescape") for line in text.split("\n")]
        # The first line may be a bad row. In a damaged file of another form, objects are indented.
        if any(line.startswith(b"{") and isinstance(parse_line(line, name, 1), DataRow) for line in lines):
            yield from parse_lines(lines, name)
        elif text.strip():
            yield BadRow(name, getattr(error, "lineno", 1), "not JSON", f"not JSON: {error}.")
        return
    rows = whole["data"] if isinstance(whole, dict) and isinstance(whole.get("data"), list) else [whole]
    damaged = has_bad_bytes(text)
    for number, value in enumerate(rows, 1):
        if damaged and has_bad_bytes(json.dumps(value, ensure_ascii=False)):
            yield BadRow(name, number, "not UTF-8", "not UTF-8.")
        else:
            yield to_row(value, name, number)


def parse_array(text: str, name: str) -> Iterator[DataRow | BadRow]:
    """Parses item by item, so that each has its line. Behind a damaged one it continues where the next starts."""
    decoder, line, start = json.JSONDecoder(), 1, 0
    position = skip_space(text, text.index("[") + 1)
    while position < len(text) and text[position] != "]":
        line, start = line + text.count("\n", start, position), position
        try:
            value, end = decoder.raw_decode(text, position)
            behind = skip_space(text, end)
            if text[behind : behind + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, behind)
        except (ValueError, RecursionError) as error:
            position = find_next_item(text, start)
            rest = "" if position else " The rest of the array cannot be read."
            problem = f"not JSON: {getattr(error, 'msg', error)}.{rest}"
            yield BadRow(name, getattr(error, "lineno", line), "not JSON", problem)
            if not position:
                return
            continue
        bad = has_bad_bytes(text[start:end])
        yield BadRow(name, line, "not UTF-8", "not UTF-8.") if bad else to_row(value, name, line)
        position = skip_space(text, behind + 1) if text[behind] == "," else behind
    if position >= len(text):
        yield BadRow(name, line, "not JSON", "not JSON: the array does not end. The file may have been cut off.")


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def find_next_item(text: str, start: int) -> int:
    """Returns where the item behind a damaged one begins, if items begin lines of the same indent; else 0."""
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    if indent.strip(" \t"):
        return 0
    # An object within the damaged item is indented further. Where nothing is indented, an object on one line is a row.
    begin = re.compile(rf"\n{indent}(?=\{{)" if indent else r"\n(?=\{[ \t]*[^ \t\r\n])").search(text, start)
    return begin.end() if begin else 0
