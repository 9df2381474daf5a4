"""Small files of data, and what becomes of them."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlsys import data
from rlsys.data import DatasetPreparer, Origin, PromptFormat, PromptRows, SelectionRules
from rlsys.data.origin import locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import BadRow, DataRow
from rlsys.errors import ConfigError


def lines(folder: Path, *rows: Any, name: str = "sums.jsonl") -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def table(folder: Path, rows: list[dict[str, Any]], name: str = "sums.parquet", **options: Any) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, **options)
    return str(folder / name)


def load(path: str, tokenizer: Any, **options: Any) -> PromptRows:
    """A data set as a run would have it, with prompts of 7 tokens at most. `options` are of Origin, Form and Rules."""
    notes: list[str] = options.pop("notes", [])
    origin, form, rules = (
        kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options} | own)
        for kind, own in (
            (Origin, {"path": path}),
            (PromptFormat, {}),
            (SelectionRules, {"max_tokens": options.pop("longest", 7)}),
        )
    )
    assert not options, options
    stored = DatasetPreparer(tokenizer, notes.append)(origin, form)
    rows = data.select_rows(origin, stored, rules)
    notes += data.describe_rows(origin, stored, rows, rules)
    return rows


def refused(path: str, tokenizer: Any, **options: Any) -> list[str]:
    """What is wrong with a data set."""
    with pytest.raises(ConfigError) as error:
        load(path, tokenizer, **options)
    return error.value.problems


def split(read: Iterable[DataRow | BadRow]) -> tuple[list[DataRow], list[BadRow]]:
    everything = list(read)
    return [f for f in everything if isinstance(f, DataRow)], [f for f in everything if isinstance(f, BadRow)]


def read_rows_of(path: str | Path, **options: Any) -> tuple[list[DataRow], list[BadRow]]:
    origin = Origin(str(path), **options)
    return split(read_rows(origin, locate_data(origin)))


def prompts(rows: Iterable[DataRow]) -> list[str]:
    return [row.fields["prompt"] for row in rows]
