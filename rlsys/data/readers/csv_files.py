"""Reads CSV. A quote that is not closed costs its own line only."""

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlsys.data.readers.rows import BadRow, DataRow, has_bad_bytes

MAX_RECORD_CHARS = 1 << 20  # a longer record means that a quote is not closed


def read_csv(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """Yields a row per record. The first record names the fields. Values are texts, with line breaks if quoted."""
    csv.field_size_limit(1 << 30)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        records = read_records(RecordLines(lines))
        header = next(records, None)
        if header is None:
            return
        line, names = header
        if isinstance(names, str) or len(set(names)) != len(names):
            problem = names if isinstance(names, str) else f"its fields are {', '.join(map(repr, names))}"
            detail = f"the first line must name the fields, each once; {problem}."
            yield BadRow(name, line, "bad header", detail)
            return
        for line, values in records:
            yield to_row(name, line, names, values)


def to_row(name: str, line: int, names: list[str], values: list[str] | str) -> DataRow | BadRow:
    if isinstance(values, str):
        return BadRow(name, line, "not CSV", f"not CSV: {values}.")
    if len(values) != len(names):
        detail = f"the line has {len(values)} fields; the header has {len(names)}."
        return BadRow(name, line, "wrong number of fields", detail)
    if any(has_bad_bytes(value) for value in values):
        return BadRow(name, line, "not UTF-8", "not UTF-8.")
    fields = dict(zip(names, values, strict=True))
    fields.pop("", None)  # an index that pandas has written
    return DataRow(name, line, fields)


class RecordLines:
    """Passes lines to the CSV reader, and takes back those of a record that did not end."""

    def __init__(self, lines: Iterable[str]):
        self.lines, self.waiting = iter(lines), deque[str]()
        self.record: list[str] = []  # the lines of the current record
        self.number = self.size = 0  # of the last line, and the characters of the current record

    def __iter__(self) -> "RecordLines":
        return self

    def __next__(self) -> str:
        if self.size > MAX_RECORD_CHARS:
            raise csv.Error(f"a quote is not closed within {MAX_RECORD_CHARS} characters")
        text = self.waiting.popleft() if self.waiting else next(self.lines)
        self.record.append(text)
        self.number, self.size = self.number + 1, self.size + len(text)
        return text

    def begin_record(self) -> int:
        """Starts a new record. Returns the number of its first line."""
        self.record, self.size = [], 0
        return self.number + 1

    def take_back(self) -> None:
        """Takes back all lines of the record but its first."""
        self.waiting.extendleft(reversed(self.record[1:]))
        self.number -= len(self.record) - 1


def read_records(lines: RecordLines) -> Iterator[tuple[int, list[str] | str]]:
    """Yields `(line, values)`, or `(line, problem)` where a record cannot be read."""
    reader = csv.reader(lines, strict=True)
    while True:
        line = lines.begin_record()
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
