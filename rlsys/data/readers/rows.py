"""Rows as readers yield them: usable ones, and bad ones with the reason."""

import re
from dataclasses import dataclass
from typing import Any

SURROGATE_ESCAPES = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True)
class DataRow:
    """DataRow("data/sums.jsonl", 17, {"prompt": "1 + 1 =", "answer": 2})"""

    file: str
    line: int  # of a parquet file or a hub data set: the row
    fields: dict[str, Any]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    BadRow("data/sums.jsonl", 17, "not JSON", "not JSON: Expecting value at column 12.")
    """

    file: str
    line: int
    reason: str  # what it is counted under
    detail: str
    rows: int = 1  # how many it stands for

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.location}: {self.detail}"


def has_bad_bytes(text: str) -> bool:
    """Returns whether the text was decoded with `surrogateescape` from bytes that are not UTF-8."""
    return not text.isascii() and bool(SURROGATE_ESCAPES.search(text))
