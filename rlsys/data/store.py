"""Prepared rows: written once, in one pass, and read at random through a memory map. Writer and reader share this file.

    rows.arrow    one record per usable row, in the order of the data: `FIELDS` and the tokens
    bad.jsonl     rows that cannot be used: file, line, reason, detail, rows
    facts.json    counts; written last, so a folder without it is incomplete

Prompts of every length are stored; `selection` chooses among them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlsys.data.demonstrations import from_stored
from rlsys.data.readers.rows import BadRow
from rlsys.types import Prompt

FIELDS = {
    "file": "string",
    "line": "int64",
    "hash": "uint64",  # of the whole row: 48 bits
    "same": "uint64",  # of the prompt's text
    "length": "int32",  # tokens, with those of the demonstration
    "source": "string",
    "text": "string",
    "messages": "string",  # JSON, or null
    "row": "string",  # JSON
    "demonstration": "string",  # see `demonstrations.to_stored`, or null
}


@dataclass
class DatasetFacts:
    """Counts of a pass. DatasetFacts(read=1000, bad={"not JSON": 3}, own_system=12, bytes=81000)"""

    read: int = 0  # rows, the bad ones included
    bad: dict[str, int] = field(default_factory=dict)  # reason → rows
    own_system: int = 0  # rows that kept their own system message
    notes: list[str] | None = None  # about the end of the first prompt
    bytes: int = 0  # of rows.arrow


class RowWriter:
    """Writes rows in batches. With `folder` None, everything stays in memory."""

    MAX_BAD_IN_MEMORY = 10  # the others are in the file only

    def __init__(self, folder: Path | None):
        self.folder, self.facts = folder, DatasetFacts()
        self.memory: list[dict[str, Any]] = []
        self.first: list[BadRow] = []
        if folder:
            import pyarrow

            self.schema = pyarrow.schema([*FIELDS.items(), ("tokens", pyarrow.list_(pyarrow.int32()))])
            self.sink: Any = pyarrow.OSFile(str(folder / "rows.arrow"), "wb")
            self.rows = pyarrow.ipc.new_file(self.sink, self.schema)
            self.bad = (folder / "bad.jsonl").open("w", encoding="utf-8")

    def add(self, records: list[dict[str, Any]]) -> None:
        """Adds records, each with the columns of `FIELDS` and `tokens`."""
        self.facts.read += len(records)
        if not self.folder:
            self.memory += records
            return
        import pyarrow

        columns = {name: [record[name] for record in records] for name in self.schema.names}
        self.rows.write_batch(pyarrow.record_batch(columns, schema=self.schema))

    def add_bad(self, bad: BadRow) -> None:
        self.facts.read += bad.rows
        self.facts.bad[bad.reason] = self.facts.bad.get(bad.reason, 0) + bad.rows
        if self.folder:
            self.bad.write(json.dumps(asdict(bad)) + "\n")
        if not self.folder or len(self.first) < self.MAX_BAD_IN_MEMORY:
            self.first.append(bad)

    def finish(self) -> "StoredDataset":
        if not self.folder:
            column = {n: np.array([r[n] for r in self.memory], dtype=FIELDS[n]) for n in ("length", "hash", "same")}
            return StoredDataset(self.facts, self.memory, column["length"], column["hash"], column["same"], self.first)
        self.rows.close()
        self.close()
        self.facts.bytes = (self.folder / "rows.arrow").stat().st_size
        (self.folder / "facts.json").write_text(json.dumps(asdict(self.facts)))
        return open_stored(self.folder)

    def close(self) -> None:
        if self.folder:
            self.bad.close()
            self.sink.close()


class RecordTable:
    """Records of a memory-mapped file."""

    def __init__(self, file: Path):
        import pyarrow

        self.table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        [record] = self.table.slice(i, 1).to_pylist()
        return dict(record)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a column of numbers. pyarrow's own `to_numpy` would import pandas."""
        kind = np.dtype(FIELDS[name])
        parts = [
            np.frombuffer(chunk.buffers()[1], kind, len(chunk), chunk.offset * kind.itemsize)
            for chunk in self.table.column(name).chunks
            if len(chunk)
        ]
        return np.concatenate([np.empty(0, kind), *parts])


def open_stored(folder: Path) -> "StoredDataset":
    """Opens what a pass wrote to a folder. Raises `OSError` or `ValueError` if it is incomplete."""
    facts = DatasetFacts(**json.loads((folder / "facts.json").read_text()))
    if (size := (folder / "rows.arrow").stat().st_size) != facts.bytes:
        raise ValueError(f"rows.arrow has {size} bytes, not {facts.bytes}")
    table, bad = RecordTable(folder / "rows.arrow"), folder / "bad.jsonl"
    with bad.open(encoding="utf-8") as lines:
        first = [BadRow(**json.loads(line)) for line in islice(lines, RowWriter.MAX_BAD_IN_MEMORY)]
    return StoredDataset(facts, table, table.column("length"), table.column("hash"), table.column("same"), first, bad)


@dataclass(frozen=True)
class StoredDataset:
    """All usable rows of a data set. Rows in a file are read on demand."""

    facts: DatasetFacts
    records: RecordTable | list[dict[str, Any]]
    lengths: NDArray[np.int32]  # [N] tokens of each prompt, with those of its demonstration
    hashes: NDArray[np.uint64]  # [N]
    text_hashes: NDArray[np.uint64]  # [N] a hash of each prompt's text
    first_bad: list[BadRow]
    bad_file: Path | None = None  # all bad rows; None: `first_bad` has all

    def __len__(self) -> int:
        return len(self.lengths)

    def row_location(self, i: int) -> str:
        return f"{self.records[i]['file']}:{self.records[i]['line']}"

    def read_all_bad(self) -> list[BadRow]:
        if self.bad_file is None:
            return self.first_bad
        return [BadRow(**json.loads(line)) for line in self.bad_file.read_text(encoding="utf-8").splitlines()]


class PromptRows(Sequence[Prompt]):
    """Selected rows of a data set as prompts, each made on demand."""

    def __init__(
        self,
        stored: StoredDataset,
        chosen: NDArray[np.int64],
        *,
        rewards: str = "",
        max_new_tokens: int = 0,
        play: str = "",
    ):
        self.stored, self.chosen, self.rewards, self.max_new_tokens = stored, chosen, rewards, max_new_tokens
        self.play = play
        self.occurrence = count_occurrences(stored.hashes)[chosen]  # [N] 1, 2 for its first repetition, …

    @property
    def longest_prompt(self) -> int:
        return int(self.stored.lengths[self.chosen].max(initial=0))

    @property
    def hashes(self) -> NDArray[np.uint64]:
        return self.stored.hashes[self.chosen]

    @property
    def text_hashes(self) -> NDArray[np.uint64]:
        return self.stored.text_hashes[self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, i: int) -> Prompt: ...
    @overload
    def __getitem__(self, i: slice) -> list[Prompt]: ...
    def __getitem__(self, i: int | slice) -> Prompt | list[Prompt]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        row = self.stored.records[int(self.chosen[i])]
        repetition = f"~{self.occurrence[i]}" if self.occurrence[i] > 1 else ""
        return Prompt(
            f"{row['source'].casefold()}:{row['hash']:012x}{repetition}",
            row["source"],
            row["text"],
            [] if self.play else row["tokens"],
            json.loads(row["row"]),
            json.loads(row["messages"]) if row["messages"] else None,
            self.rewards,
            self.max_new_tokens,
            self.play,
            from_stored(row["demonstration"]),
        )


class JoinedPrompts(Sequence[Prompt]):
    """Several sequences of prompts, end to end. A row that is in two of them gets two uids."""

    def __init__(self, parts: list[PromptRows]):
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])
        counted = count_occurrences(np.concatenate([p.hashes for p in parts]))
        for part, occurrence in zip(parts, np.split(counted, self.starts[1:-1]), strict=True):
            part.occurrence = occurrence

    @property
    def longest_prompt(self) -> int:
        return max(p.longest_prompt for p in self.parts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @overload
    def __getitem__(self, i: int) -> Prompt: ...
    @overload
    def __getitem__(self, i: slice) -> list[Prompt]: ...
    def __getitem__(self, i: int | slice) -> Prompt | list[Prompt]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.parts[part][i - int(self.starts[part])]


def count_occurrences(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Counts how often each value has occurred so far.  [N] -> [N]    [7, 8, 7, 7] -> [1, 1, 2, 3]"""
    order = np.argsort(hashes, kind="stable")
    ordered, places = hashes[order], np.arange(len(hashes))
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] + np.uint64(1)) != 0)
    begin = np.repeat(begins, np.diff(np.append(begins, len(hashes))))
    counted = np.empty(len(hashes), dtype=np.int64)
    counted[order] = places - begin + 1
    return counted
