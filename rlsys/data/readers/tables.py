"""Reads columns: parquet files, and data sets of the Hugging Face `datasets` library."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.data.origin import DataLocation, Origin
from rlsys.data.readers.rows import BadRow, DataRow
from rlsys.errors import ConfigError

BATCH_ROWS = 1000  # rows that exist as Python objects at the same time


def read_parquet(file: Path, name: str) -> Iterator[DataRow | BadRow]:
    """Yields the rows of a parquet file.

    A row group that cannot be decoded is left out whole: else half of its columns would belong to other rows.
    """
    import pyarrow.parquet

    try:
        # Without these two, a whole row group would be in memory at once.
        bounded = {"pre_buffer": False, "buffer_size": 1 << 20}
        source = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, **bounded)
    except Exception as error:  # the library raises errors of many kinds
        detail = f"{file.name} is not a readable parquet file: {one_line(error)}"
        yield BadRow(name, 1, "damaged file", detail)
        return
    with source:
        line = 0
        for group in range(source.num_row_groups):
            count = source.metadata.row_group(group).num_rows
            try:
                for _ in source.iter_batches(BATCH_ROWS, row_groups=[group]):
                    pass  # decoded twice: nothing of a damaged group is used, and no group is held in memory
            except Exception as error:
                rows = f"rows {line + 1} to {line + count}"
                detail = f"row group {group + 1} ({rows}) cannot be decoded: {one_line(error)}"
                yield BadRow(name, line + 1, "damaged row group", detail, count)
            else:
                yield from read_batches(source.iter_batches(BATCH_ROWS, row_groups=[group]), name, line)
            line += count


def read_dataset(dataset: Any, name: str) -> Iterator[DataRow | BadRow]:
    yield from read_batches(dataset.with_format("arrow").iter(BATCH_ROWS), name, 0)


def read_batches(batches: Any, name: str, line: int) -> Iterator[DataRow | BadRow]:
    """Yields the rows of Arrow batches, which come after row `line`."""
    for batch in batches:
        yield from read_batch(batch, name, line)
        line += batch.num_rows


def read_batch(batch: Any, name: str, line: int) -> Iterator[DataRow | BadRow]:
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:  # only some of its rows are to blame: read them one by one
            yield from read_batches((batch.slice(i, 1) for i in range(batch.num_rows)), name, line)
        elif isinstance(error, UnicodeDecodeError):
            yield BadRow(name, line + 1, "not UTF-8", "not UTF-8.")
        else:  # a date after the year 9999, an unknown time zone
            detail = f"a value cannot be read: {one_line(error)} Leave its column out, or make it a text."
            yield BadRow(name, line + 1, "not readable", detail)
        return
    for number, fields in enumerate(rows, line + 1):
        yield DataRow(name, number, fields)


def load_hugging_face(origin: Origin, location: DataLocation) -> Any:
    """Loads a data set of the `datasets` library: saved on disk, or from the hub through the library's cache."""
    import datasets

    try:
        if location.kind == "saved":
            return datasets.load_from_disk(str(location.files[0]))
        return datasets.load_dataset(origin.path, origin.subset or None, split=origin.split)
    except Exception as error:  # no network, no such name, split or subset: the library raises errors of many kinds
        path = Path(origin.path).absolute()
        way_out = "" if location.kind == "saved" else f" There is no {path} either, if a file was meant."
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{origin.path} cannot be loaded: {problem}{way_out}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") + "."
