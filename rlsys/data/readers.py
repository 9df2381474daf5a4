"""Files to rows, one after the other in bounded memory. What cannot be read comes as a `Bad`, and reading goes on behind it.

.jsonl .jsonl.gz .jsonl.zst   by lines            .parquet   by batches of a row group
.csv                          by records          .json      the text of the whole file is held in memory
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.data.origin import DataLocation, Origin
from rlsys.tasks import zigzag

BATCH = 1000  # rows of parquet and Arrow data held as Python objects at a time
ESCAPES = re.compile("[\udc80-\udcff]")
LONGEST_RECORD = 1 << 20  # characters of a CSV record over several lines: more is a quote that nobody closes


@dataclass(frozen=True, slots=True)
class DataRow:
    """Row("data/sums.jsonl", 17, {"prompt": "1 + 1 =", "answer": 2})"""

    file: str
    line: int  # of a parquet file or a hub data set: the row
    fields: dict[str, Any]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """What cannot be used. Bad("data/sums.jsonl", 17, "not JSON", "not JSON: Expecting value at column 12.")"""

    file: str
    line: int
    reason: str  # what it is counted under
    detail: str
    rows: int = 1

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.location}: {self.detail}"


def read_rows(origin: Origin, place: DataLocation) -> Iterator[DataRow | BadRow]:
    """Every row of a data set, in the order of its files."""
    if place.kind == "builtin":
        for line, fields in enumerate(zigzag.rows(place.name), 1):
            yield DataRow(place.name, line, fields)
    elif place.kind in ("saved", "hub"):
        yield from _tables(origin.path, load_hugging_face(origin, place))
    else:
        for file in place.files:
            # The file as the user wrote it, or below the folder as the user wrote it.
            name = origin.path if len(place.files) == 1 and Path(origin.path).expanduser() == file else str(file)
            yield from _file(file, name)


def _file(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    kind = {".jsonl": read_json_lines, ".gz": _gzipped, ".zst": _zstandard, ".json": read_json, ".csv": read_csv}
    try:
        yield from kind.get(file.suffix, read_parquet)(file, name)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}.") from None


# --- JSON ----------------------------------------------------------------------------------------------------------------


def read_json_lines(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    with file.open("rb") as lines:
        yield from _lines(lines, name)


def _gzipped(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    yield from _compressed(partial(gzip.GzipFile, file), name)


def _zstandard(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    import pyarrow

    yield from _compressed(lambda: io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd")), name)


def _compressed(open_again: Callable[[], io.BufferedIOBase], name: str) -> Iterator[DataRow | BadRow]:
    """Of a file that was cut off, what is there. One that is damaged within is left out: its checksum stands at its end, and
    before that noise may look like rows."""
    broken = ""
    try:
        with open_again() as stream:
            while stream.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        broken = str(error).rstrip(".")
        if not isinstance(error, EOFError) and "Truncated" not in broken:
            yield BadRow(name, 1, "damaged file", f"the compressed file is damaged: {broken}.")
            return
    line = 0
    try:
        with open_again() as stream:
            for found in _lines(stream, name):
                line = found.line
                yield found
    except (EOFError, OSError):
        yield BadRow(name, line + 1, "damaged file", f"the compressed file is cut off here: {broken}.")


def _lines(lines: Iterable[bytes], name: str) -> Iterator[DataRow | BadRow]:
    for line, text in enumerate(lines, 1):
        text = text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text  # a byte order mark
        if text.strip():
            yield _row(text, name, line)


def _row(text: bytes, name: str, line: int) -> DataRow | BadRow:
    try:
        return _object(json.loads(text.decode().rstrip("\r\n")), name, line)
    except json.JSONDecodeError as error:
        return BadRow(name, line, "not JSON", f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}.")
    except UnicodeDecodeError as error:
        return BadRow(name, line, "not UTF-8", f"not UTF-8: {error.reason} at byte {error.start + 1}.")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        return BadRow(name, line, "not JSON", f"not JSON that can be read: {error}.")


def _object(value: Any, name: str, line: int) -> DataRow | BadRow:
    if isinstance(value, dict):
        return DataRow(name, line, value)
    said = json.dumps(value, ensure_ascii=False)[:60]
    return BadRow(name, line, "not an object", f'a row is an object such as {{"prompt": "…"}}; this one is {said}.')


def read_json(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """An array of objects, {"data": [objects]}, one object, or JSON lines that are called .json."""
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    if text.lstrip().startswith("["):
        yield from _array(text, name)
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line.encode(errors="surrogateescape") for line in text.split("\n")]
        # The first may be a bad one. Objects within a damaged file of another form are indented.
        if any(line.startswith(b"{") and isinstance(_row(line, name, 1), DataRow) for line in lines):
            yield from _lines(lines, name)
        elif text.strip():
            yield BadRow(name, getattr(error, "lineno", 1), "not JSON", f"not JSON: {error}.")
        return
    rows = whole["data"] if isinstance(whole, dict) and isinstance(whole.get("data"), list) else [whole]
    damaged = _escaped(text)
    for number, value in enumerate(rows, 1):
        if damaged and _escaped(json.dumps(value, ensure_ascii=False)):
            yield BadRow(name, number, "not UTF-8", "not UTF-8.")
        else:
            yield _object(value, name, number)


def _array(text: str, name: str) -> Iterator[DataRow | BadRow]:
    """Item by item, so that each has its line. After one that is not JSON it goes on where the next one surely begins."""
    decoder, line, seen = json.JSONDecoder(), 1, 0

    def skip(position: int, marks: str) -> int:
        while position < len(text) and (text[position].isspace() or text[position] in marks):
            position += 1
        return position

    position, comma = skip(text.index("[") + 1, ""), ","
    while position < len(text) and text[position] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, position = decoder.raw_decode(text, position)
            behind = skip(position, "")
            comma = text[behind : behind + 1]
            if comma not in (",", "]") or not comma:
                raise json.JSONDecodeError("Expecting ',' or ']'", text, behind)
            utf8 = not _escaped(text[seen:position])
            yield _object(value, name, line) if utf8 else BadRow(name, line, "not UTF-8", "not UTF-8.")
            position = skip(behind + 1, "") if comma == "," else behind
        except (ValueError, RecursionError) as error:
            at = getattr(error, "lineno", line)
            said = getattr(error, "msg", str(error))
            position = _next_item(text, seen)
            rest = "" if position else " The rest of the array cannot be read."
            yield BadRow(name, at, "not JSON", f"not JSON: {said}.{rest}")
            if not position:
                return
    if position >= len(text):
        yield BadRow(name, line, "not JSON", "not JSON: the array does not end. The file may have been cut off.")


def _next_item(text: str, start: int) -> int:
    """Where the item after a damaged one begins, if items begin lines that are indented alike; 0 where that cannot be told."""
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    if indent.strip(" \t"):
        return 0
    # An object within the damaged item is indented further; where nothing is indented, one that stands on a line is a row.
    begin = re.compile(rf"\n{indent}(?=\{{)" if indent else r"\n(?=\{[ \t]*[^ \t\r\n])").search(text, start)
    return begin.end() if begin else 0


# --- CSV -----------------------------------------------------------------------------------------------------------------


def read_csv(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """The first record names the fields. Values are texts; quoted ones may have line breaks."""
    csv.field_size_limit(1 << 30)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        records = _records(_Lines(lines))
        header = next(records, None)
        if header is None:
            return
        line, names = header
        if isinstance(names, str) or len(set(names)) != len(names):
            said = names if isinstance(names, str) else f"its fields are {', '.join(map(repr, names))}"
            yield BadRow(name, line, "bad header", f"the first line must name the fields, each once; {said}.")
            return
        for line, values in records:
            if isinstance(values, str):
                yield BadRow(name, line, "not CSV", f"not CSV: {values}.")
            elif len(values) != len(names):
                yield BadRow(
                    name,
                    line,
                    "wrong number of fields",
                    f"the line has {len(values)} fields; the header has {len(names)}.",
                )
            elif any(_escaped(value) for value in values):
                yield BadRow(name, line, "not UTF-8", "not UTF-8.")
            else:
                fields = dict(zip(names, values, strict=True))
                fields.pop("", None)  # an index that pandas has written
                yield DataRow(name, line, fields)


def _escaped(text: str) -> bool:
    """Whether there were bytes that are not UTF-8: `surrogateescape` has made these of them."""
    return not text.isascii() and bool(ESCAPES.search(text))


class _Lines:
    """Hands lines to the CSV reader, and takes back those of a record that did not end."""

    def __init__(self, lines: Iterable[str]):
        self.lines, self.waiting = iter(lines), deque[str]()
        self.record: list[str] = []
        self.number = self.size = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if self.size > LONGEST_RECORD:
            raise csv.Error(f"a quote is not closed within {LONGEST_RECORD} characters")
        text = self.waiting.popleft() if self.waiting else next(self.lines)
        self.record.append(text)
        self.number, self.size = self.number + 1, self.size + len(text)
        return text

    def begin(self) -> int:
        """A new record; the number of its first line."""
        self.record, self.size = [], 0
        return self.number + 1

    def take_back(self) -> None:
        """All lines of the record but its first."""
        self.waiting.extendleft(reversed(self.record[1:]))
        self.number -= len(self.record) - 1


def _records(lines: _Lines) -> Iterator[tuple[int, list[str] | str]]:
    """`(line, values)`, or `(line, what is wrong)`: a quote that is not closed costs its own line only."""
    reader = csv.reader(lines, strict=True)
    while True:
        line = lines.begin()
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.take_back()
            yield line, str(error)
            continue
        if values:
            yield line, values


# --- columns -------------------------------------------------------------------------------------------------------------


def read_parquet(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """A row group that cannot be decoded is left out whole: half of its columns would be of other rows."""
    import pyarrow.parquet

    try:
        # Without these two, all of a row group is in memory at once.
        bounded = {"pre_buffer": False, "buffer_size": 1 << 20}
        source = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, **bounded)
    except Exception as error:  # whatever the library makes of the bytes
        yield BadRow(name, 1, "damaged file", f"{file.name} is not a readable parquet file: {_said(error)}")
        return
    with source:
        line = 0
        for group in range(source.num_row_groups):
            count = source.metadata.row_group(group).num_rows
            try:
                for _ in source.iter_batches(BATCH, row_groups=[group]):
                    pass  # decoded twice, so that nothing of a damaged group is used and no group is held in memory
            except Exception as error:
                last = line + count
                said = f"row group {group + 1} (rows {line + 1} to {last}) cannot be decoded: {_said(error)}"
                yield BadRow(name, line + 1, "damaged row group", said, count)
                line = last
                continue
            for batch in source.iter_batches(BATCH, row_groups=[group]):
                yield from _batch(batch, name, line)
                line += batch.num_rows


def _tables(name: str, dataset: Any) -> Iterator[DataRow | BadRow]:
    line = 0
    for table in dataset.with_format("arrow").iter(BATCH):
        yield from _batch(table, name, line)
        line += table.num_rows


def _batch(batch: Any, name: str, line: int) -> Iterator[DataRow | BadRow]:
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # one row's; find it
        if batch.num_rows == 1:
            if isinstance(error, UnicodeDecodeError):
                yield BadRow(name, line + 1, "not UTF-8", "not UTF-8.")
            else:  # a date after the year 9999, a time zone that nobody knows
                said = f"a value cannot be read: {_said(error)} Leave its column out, or make it a text."
                yield BadRow(name, line + 1, "not readable", said)
            return
        for i in range(batch.num_rows):
            yield from _batch(batch.slice(i, 1), name, line + i)
        return
    for number, fields in enumerate(rows, line + 1):
        yield DataRow(name, number, fields)


def load_hugging_face(origin: Origin, place: DataLocation) -> Any:
    """A data set of the datasets library: saved on disk, or from the hub by way of its cache."""
    import datasets

    try:
        if place.kind == "saved":
            return datasets.load_from_disk(str(place.files[0]))
        return datasets.load_dataset(origin.path, origin.subset or None, split=origin.split)
    except Exception as error:  # the library raises of every kind: no network, no such name, split or subset
        way_out = (
            "" if place.kind == "saved" else f" There is no {Path(origin.path).absolute()} either, if a file was meant."
        )
        raise ConfigError(f"{origin.path} cannot be loaded: {type(error).__name__}: {_said(error)}{way_out}") from None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") + "."
