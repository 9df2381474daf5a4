"""Reads files row by row in bounded memory. What cannot be read comes as a `BadRow`, and reading continues behind it.

.jsonl .jsonl.gz .jsonl.zst   by lines            .parquet   by batches of a row group
.csv                          by records          .json      the text of the whole file is held in memory
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rlsys.data.origin import DataLocation, Origin
from rlsys.data.readers.csv_files import read_csv
from rlsys.data.readers.json_files import read_gzipped_lines, read_json, read_json_lines, read_zstandard_lines
from rlsys.data.readers.rows import BadRow, DataRow
from rlsys.data.readers.tables import load_hugging_face, read_dataset, read_parquet
from rlsys.errors import ConfigError
from rlsys.tasks import gym, taskset
from rlsys.tasks.builtin import ROWS

READERS: dict[str, Callable[[Path, str], Iterator[DataRow | BadRow]]] = {
    ".jsonl": read_json_lines,
    ".gz": read_gzipped_lines,
    ".zst": read_zstandard_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def read_rows(origin: Origin, location: DataLocation) -> Iterator[DataRow | BadRow]:
    """Yields every row of a data set, in the order of its files."""
    if location.kind == "builtin":
        for line, fields in enumerate(ROWS[location.name](location.name), 1):
            yield DataRow(location.name, line, fields)
    elif location.kind in ("gym", "verifiers"):
        package = gym if location.kind == "gym" else taskset
        for line, fields in enumerate(package.rows(location.name, json.loads(origin.options)), 1):
            yield DataRow(origin.path, line, fields)
    elif location.kind in ("saved", "hub"):
        yield from read_dataset(load_hugging_face(origin, location), origin.path)
    else:
        for file in location.files:
            # A single file is called as the user wrote it.
            is_named = len(location.files) == 1 and Path(origin.path).expanduser() == file
            yield from read_file(file, origin.path if is_named else str(file))


def read_file(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    try:
        yield from READERS[file.suffix](file, name)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}.") from None
