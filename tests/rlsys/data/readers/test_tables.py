"""The reader of parquet, and what it makes of damaged files."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_files import prompts, read_rows_of, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_parquet_rows_are_numbered_through_the_row_groups(tmp_path):
    path = table(tmp_path, [{"prompt": f"{n}"} for n in range(25)], row_group_size=10)
    rows, bad = read_rows_of(path)
    assert ([r.line for r in rows], prompts(rows), bad) == (list(range(1, 26)), [str(n) for n in range(25)], [])


def damaged(path, group: int, *, at: int = 4, count: int = 60) -> None:
    """Overwrites part of a row group's first column."""
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(group).column(0)
    start = (column.dictionary_page_offset or column.data_page_offset) + at
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * min(count, column.total_compressed_size - at))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_damaged_row_group_is_left_out_whole_and_counted_by_its_rows(tmp_path, group):
    path = table(tmp_path, [{"prompt": f"{n:05}"} for n in range(300)], row_group_size=100)
    damaged(path, group, at=0)
    rows, [bad] = read_rows_of(path)
    left = range(100 * group, 100 * group + 100)
    assert prompts(rows) == [f"{n:05}" for n in range(300) if n not in left]
    assert [r.line for r in rows] == [n + 1 for n in range(300) if n not in left]
    assert (bad.line, bad.reason, bad.rows) == (left[0] + 1, "damaged row group", 100)
    assert f"row group {group + 1} (rows {left[0] + 1} to {left[-1] + 1}) cannot be decoded" in bad.detail


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.integers(0, 4), st.integers(0, 300), st.integers(1, 200))
def test_damage_within_a_row_group_never_costs_a_row_of_another(tmp_path, group, at, count):
    path = table(
        tmp_path,
        [{"prompt": f"{n:05}"} for n in range(500)],
        row_group_size=100,
        write_page_checksum=True,
        use_dictionary=False,
    )
    damaged(path, group, at=at, count=count)
    rows, bad = read_rows_of(path)
    left = range(100 * group, 100 * group + 100)
    assert prompts(rows) == [f"{n:05}" for n in range(500) if n not in left]
    assert [b.rows for b in bad] == [100]


def test_text_in_parquet_that_is_not_utf_8_is_one_bad_row(tmp_path):
    values = pyarrow.Array.from_buffers(
        pyarrow.string(),
        3,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xffc")],
    )
    pyarrow.parquet.write_table(pyarrow.table({"prompt": values}), tmp_path / "a.parquet")
    rows, [bad] = read_rows_of(tmp_path / "a.parquet")
    assert (prompts(rows), bad.line, bad.reason) == (["a", "c"], 2, "not UTF-8")


def test_a_date_that_python_has_none_for_costs_its_own_row_only(tmp_path):
    dates = pyarrow.array([0, 10**18, 1], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "seen": dates}), tmp_path / "a.parquet")
    rows, [bad] = read_rows_of(tmp_path / "a.parquet")
    assert (prompts(rows), bad.line, bad.reason) == (["a", "c"], 2, "not readable")
    assert "Leave its column out, or make it a text." in bad.detail


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_parquet_file_that_was_cut_off_is_a_damaged_file(tmp_path, keep):
    path = table(tmp_path, [{"prompt": f"{n:05}"} for n in range(300)])
    Path(path).write_bytes(Path(path).read_bytes()[:keep])
    rows, [bad] = read_rows_of(path)
    assert (rows, bad.reason) == ([], "damaged file")
    assert "sums.parquet is not a readable parquet file" in bad.detail
