"""Readers of every format, and what they make of damaged files."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_files import lines, split, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.config.schema import ConfigError
from rlsys.data import Origin
from rlsys.data.origin import locate_data
from rlsys.data.readers import read_rows


def read_rows_of(path, **options):
    origin = Origin(str(path), **options)
    return split(read_rows(origin, locate_data(origin)))


def prompts(rows):
    return [row.fields["prompt"] for row in rows]


# --- JSON ------------------------------------------------------------------------------------------------------------------


def test_lines_are_numbered_as_an_editor_numbers_them(tmp_path):
    rows, bad = read_rows_of(lines(tmp_path, "", {"prompt": "a"}, "  ", {"prompt": "b"}, "{"))
    assert [(r.line, r.fields["prompt"]) for r in rows] == [(2, "a"), (4, "b")]
    assert [b.location for b in bad] == [f"{tmp_path}/sums.jsonl:5"]


def test_windows_line_ends_and_byte_order_marks_do_not_matter(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    rows, bad = read_rows_of(tmp_path / "a.jsonl")
    assert (prompts(rows), bad) == (["a", "b"], [])


def test_a_line_that_is_not_text_is_bad(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9>"}\n{"prompt": "b"}')
    rows, [bad] = read_rows_of(tmp_path / "latin.jsonl")
    assert prompts(rows) == ["a", "b"]
    assert "latin.jsonl:2: not UTF-8: invalid continuation byte at byte 13" in str(bad)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "1" * 5000, '{"a": ' + "1" * 5000 + "}"])
def test_what_would_break_a_parser_is_a_bad_row(tmp_path, text):
    rows, [bad] = read_rows_of(lines(tmp_path, text, {"prompt": "a"}))
    assert prompts(rows) == ["a"]
    assert (bad.line, bad.reason) == (1, "not JSON")


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines_are_lines(tmp_path, ending):
    text = "".join(json.dumps({"prompt": f"{n} {n * 7919 % 1000}"}) + "\n" for n in range(20_000)).encode()
    file = tmp_path / f"a.jsonl.{ending}"
    with pyarrow.output_stream(str(file), compression="gzip" if ending == "gz" else "zstd") as out:
        out.write(text)
    rows, bad = read_rows_of(file)
    assert ([r.line for r in rows], bad) == (list(range(1, 20_001)), [])
    whole, middle = file.read_bytes(), file.stat().st_size // 2
    file.write_bytes(whole[:middle])
    rows, bad = read_rows_of(file)
    assert [r.line for r in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 5000
    assert "the compressed file is cut off here" in bad[-1].detail


def test_a_compressed_file_whose_checksum_is_wrong_is_not_used(tmp_path):
    whole = gzip.compress("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(20_000)).encode())
    middle = len(whole) // 2
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:middle] + b"\xa5" * 64 + whole[middle + 64 :])
    rows, [bad] = read_rows_of(tmp_path / "a.jsonl.gz")
    assert (rows, bad.line, bad.reason) == ([], 1, "damaged file")


def test_what_is_called_compressed_and_is_not_is_a_damaged_file(tmp_path):
    rows, [bad] = read_rows_of(lines(tmp_path, {"prompt": "a"}, name="a.jsonl.gz"))
    assert (rows, bad.line, bad.reason) == ([], 1, "damaged file")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('[{"prompt": "a"},\n {"prompt": "b"}\n]', [1, 2]),
        ('\n[\n{"prompt": "a"\n},\n\n{"prompt": "b"}]\n', [3, 6]),
        ('{"version": 2, "data": [{"prompt": "a"}, {"prompt": "b"}]}', [1, 2]),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', [1, 2]),
    ],
)
def test_json_files_hold_arrays_or_data_or_lines(tmp_path, text, at):
    (tmp_path / "a.json").write_text(text)
    rows, bad = read_rows_of(tmp_path / "a.json")
    assert (prompts(rows), [r.line for r in rows], bad) == (["a", "b"], at, [])


def test_a_bad_line_in_a_json_file_of_lines_costs_no_other_line(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": }\n{"prompt": "a"}\n{"prompt": "b"}\n{"prom')
    rows, bad = read_rows_of(tmp_path / "a.json")
    assert (prompts(rows), [b.line for b in bad]) == (["a", "b"], [1, 4])


def test_a_damaged_item_and_one_that_is_not_utf_8_cost_themselves_only(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[\n{"prompt": },\n{"prom,\n{"prompt": "\xe9"},\n{"prompt": "b"}]')
    rows, bad = read_rows_of(tmp_path / "a.json")
    assert prompts(rows) == ["b"]
    assert [(b.line, b.reason) for b in bad] == [(2, "not JSON"), (3, "not JSON"), (4, "not UTF-8")]


@pytest.mark.parametrize("indent", [None, 1, 2, "\t"])
@pytest.mark.parametrize("damage", [('"b"', ""), ('"b"', '"b'), ("}", ""), ("{", "[")])
def test_a_damaged_item_of_a_json_array_costs_no_other_if_items_begin_lines(tmp_path, indent, damage):
    items = [
        json.dumps({"prompt": [{"role": "user", "content": c}], "answer": {"is": c}}, indent=indent) for c in "abcd"
    ]
    items[1] = items[1].replace(*damage)
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(items) + "\n]")
    if indent:  # as json.dump writes it
        indented = [" " + item.replace("\n", "\n ") for item in items]
        (tmp_path / "a.json").write_text("[\n" + ",\n".join(indented) + "\n]")
    rows, [bad] = read_rows_of(tmp_path / "a.json")
    assert [r.fields["answer"]["is"] for r in rows] == ["a", "c", "d"]
    text = (tmp_path / "a.json").read_text().splitlines()
    assert [text[r.line - 1].strip()[0] for r in rows] == ["{"] * 3
    assert "rest" not in bad.detail


@pytest.mark.parametrize(
    "text",
    [
        b'[{"prompt": "a"}, {"prompt": "\xe9"}, {"prompt": "b"}]',
        b'{"data": [{"prompt": "a"}, {"prompt": "\xe9"}, {"prompt": "b"}]}',
        b'{"prompt": "a"}\n{"prompt": "\xe9"}\n{"prompt": "b"}',
        b'[\n{"prompt": "a"},\n{"prompt": "\xe9},\n{"prompt": "b"}]',
    ],
)
def test_what_is_not_utf_8_in_a_json_file_costs_its_own_row_only(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    rows, [bad] = read_rows_of(tmp_path / "a.json")
    assert (prompts(rows), bad.reason in ("not UTF-8", "not JSON")) == (["a", "b"], True)


def test_without_indents_objects_within_a_damaged_item_are_not_rows(tmp_path):
    text = json.dumps([{"prompt": [{"role": "user", "content": c}]} for c in "ab"], indent=0)
    (tmp_path / "a.json").write_text(text.replace('"role"', "role", 1))
    rows, [bad] = read_rows_of(tmp_path / "a.json")
    assert (rows, bad.line) == ([], 5)
    assert "The rest of the array cannot be read." in bad.detail


def test_objects_within_a_damaged_json_file_are_no_rows(tmp_path):
    (tmp_path / "a.json").write_text('{"data": [\n  {"prompt": },\n  {"prompt": "b"}\n]}')
    rows, [bad] = read_rows_of(tmp_path / "a.json")
    assert (rows, bad.line, bad.reason) == ([], 2, "not JSON")


def test_a_json_file_may_be_one_row(tmp_path):
    (tmp_path / "1.json").write_text('{\n  "prompt": "a"\n}')
    rows, bad = read_rows_of(tmp_path / "1.json")
    assert (prompts(rows), bad) == (["a"], [])


@pytest.mark.parametrize(
    ("text", "kept", "line", "message"),
    [
        ('[{"prompt": "a"},\n{"prompt": }]', 1, 2, "Expecting value"),
        ('[{"prompt": "a"} {"prompt": "b"}]', 0, 1, "Expecting ',' or ']'"),
        ('[{"prompt": "a"},\n{"prompt": "b"},', 2, 2, "does not end"),
        ('[{"prompt": "a"},\n{"prompt": "b"', 1, 2, "The rest of the array cannot be read"),
        ('[{"prompt": "a"},\n7,{"prompt": "b"}]', 2, 2, "a row is an object"),
        ('{"data": [{"prompt": "a"}', 0, 1, "not JSON"),
    ],
)
def test_a_damaged_json_file_keeps_what_stands_before_the_damage(tmp_path, text, kept, line, message):
    (tmp_path / "a.json").write_text(text)
    rows, [bad] = read_rows_of(tmp_path / "a.json")
    assert (len(rows), bad.line) == (kept, line)
    assert message in bad.detail


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.none())), max_size=6),
    st.sampled_from([None, 0, 2]),
)
def test_any_array_of_objects_is_read_back(tmp_path, objects, indent):
    (tmp_path / "a.json").write_text(json.dumps(objects, indent=indent))
    rows, bad = read_rows_of(tmp_path / "a.json")
    assert ([r.fields for r in rows], bad) == (objects, [])


# --- CSV -------------------------------------------------------------------------------------------------------------------


def csv_file(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path / "a.csv"


def test_csv_has_quotes_line_breaks_and_a_header(tmp_path):
    rows, bad = read_rows_of(csv_file(tmp_path, 'prompt,answer\n"a, ""b""\nc",1\n\nd,\n'))
    assert [(r.line, r.fields) for r in rows] == [
        (2, {"prompt": 'a, "b"\nc', "answer": "1"}),
        (5, {"prompt": "d", "answer": ""}),
    ]
    assert bad == []


def test_the_index_that_pandas_writes_is_no_field(tmp_path):
    [row], _ = read_rows_of(csv_file(tmp_path, ",prompt\n0,a\n"))
    assert row.fields == {"prompt": "a"}


def test_a_csv_row_with_too_many_or_too_few_fields_is_bad(tmp_path):
    rows, bad = read_rows_of(csv_file(tmp_path, "prompt,answer\na,1\nb,2,3\nc\nd,4\n"))
    assert prompts(rows) == ["a", "d"]
    assert [str(b).rpartition("a.csv")[2] for b in bad] == [
        ":3: the line has 3 fields; the header has 2.",
        ":4: the line has 1 fields; the header has 2.",
    ]


@pytest.mark.parametrize("rest", ['c,3\nd,"4"\n', "c,3\nd,4\n"])
def test_a_quote_that_is_not_closed_costs_its_own_line_only(tmp_path, rest):
    rows, [bad] = read_rows_of(csv_file(tmp_path, f'prompt,answer\na,1\n"b,2\n{rest}'))
    assert [(r.line, r.fields["prompt"]) for r in rows] == [(2, "a"), (4, "c"), (5, "d")]
    assert (bad.line, bad.reason) == (3, "not CSV")


def test_a_csv_line_that_is_not_text_is_bad(tmp_path):
    rows, [bad] = read_rows_of(csv_file(tmp_path, b"prompt\na\n\xff\nb\n"))
    assert (prompts(rows), bad.line, bad.reason) == (["a", "b"], 3, "not UTF-8")


def test_a_header_that_names_a_field_twice_is_refused(tmp_path):
    rows, [bad] = read_rows_of(csv_file(tmp_path, "prompt,prompt\na,b\n"))
    assert (rows, bad.reason) == ([], "bad header")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\r\0")), st.text("ab\n\"', ")),
        min_size=1,
        max_size=6,
    )
)
def test_what_the_csv_module_writes_is_read_back_with_its_lines(tmp_path, pairs):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([("prompt", "answer"), *pairs])
    rows, bad = read_rows_of(tmp_path / "a.csv")
    assert ([(r.fields["prompt"], r.fields["answer"]) for r in rows], bad) == (pairs, [])
    at = 2
    for row, (prompt, answer) in zip(rows, pairs, strict=True):
        assert row.line == at
        at += 1 + (prompt + answer).count("\n")


# --- columns ---------------------------------------------------------------------------------------------------------------


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


# --- folders and Hugging Face data sets ------------------------------------------------------------------------------------


def test_a_folder_is_its_files_in_order(tmp_path):
    for n in (2, 1):
        lines(tmp_path / "shards", {"prompt": f"{n}"}, name=f"part-{n}.jsonl")
    table(tmp_path / "shards", [{"prompt": "0"}], name="part-0.parquet")
    lines(tmp_path / "shards" / ".cache", {"prompt": "x"}, name="x.jsonl")
    rows, bad = read_rows_of(tmp_path / "shards")
    assert (prompts(rows), bad) == (["0", "1", "2"], [])
    assert [r.location.rpartition("/")[2] for r in rows] == ["part-0.parquet:1", "part-1.jsonl:1", "part-2.jsonl:1"]


def test_a_copy_of_a_hub_repository_has_splits_and_subsets(tmp_path):
    for subset in ("main", "socratic"):
        for name in ("train", "test"):
            table(tmp_path / "gsm8k", [{"prompt": f"{subset} {name}"}], name=f"{subset}/{name}-00000-of-00001.parquet")
    assert prompts(read_rows_of(tmp_path / "gsm8k", subset="main", split="test")[0]) == ["main test"]
    assert prompts(read_rows_of(tmp_path / "gsm8k", subset="socratic")[0]) == ["socratic train"]
    with pytest.raises(ConfigError, match="no folder `mian` for its subset; folders there: main, socratic"):
        read_rows_of(tmp_path / "gsm8k", subset="mian")
    with pytest.raises(ConfigError, match="no files of a split `validation`; it has test, train"):
        read_rows_of(tmp_path / "gsm8k", subset="main", split="validation")


def test_a_damaged_file_of_a_folder_costs_no_other_file(tmp_path):
    table(tmp_path / "shards", [{"prompt": "0"}], name="0.parquet")
    lines(tmp_path / "shards", "nonsense", name="1.parquet")
    rows, [bad] = read_rows_of(tmp_path / "shards")
    assert (prompts(rows), bad.file.rpartition("/")[2]) == (["0"], "1.parquet")


def test_what_the_datasets_library_has_saved_is_read(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    assert [r.fields for r in read_rows_of(tmp_path / "one")[0]] == [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 2},
    ]
    rows, bad = read_rows_of(tmp_path / "two", split="test")
    assert ([r.location for r in rows], prompts(rows), bad) == ([f"{tmp_path}/two:1"], ["b"], [])
    with pytest.raises(ConfigError, match="no split `dev`; it has train, test"):
        read_rows_of(tmp_path / "two", split="dev")


def test_a_saved_data_set_that_is_damaged_is_refused(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "one")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="one cannot be loaded: "):
        read_rows_of(tmp_path / "one")


def test_a_hub_name_goes_to_the_datasets_library(tmp_path, monkeypatch):
    import datasets

    loads = []

    def load_dataset(*arguments, **options):
        loads.append((arguments, options))
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    rows, _ = read_rows_of("openai/gsm8k", subset="main", split="test")
    assert [r.location for r in rows] == ["openai/gsm8k:1"]
    assert loads == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_why_a_hub_name_cannot_be_had_is_said(tmp_path, monkeypatch):
    import datasets

    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"openai/gsm8k cannot be loaded: ConnectionError: Couldn't reach .* if a file was meant"
    ):
        read_rows_of("openai/gsm8k")


# --- what a path is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.jsonl", "gone.jsonl does not exist"),
        ("data/*.jsonl", "It is taken as one name; give a folder, or files as a list: [a.jsonl, b.jsonl]."),
        ("a.jsonl,b.jsonl", "It is taken as one name"),
        ("data/gone", "data/gone does not exist"),
        ("gsm8k", "gsm8k does not exist"),
        ("./openai/gsm8k", "does not exist"),
        ("builtin:zagzig", "builtin:zagzig does not exist; built in: builtin:zigzag"),
        ("notes.txt", "notes.txt must end in .jsonl, "),
        ("nothing", "nothing holds no data"),
    ],
)
def test_what_is_no_data_is_refused_with_a_reason(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError) as error:
        locate_data(Origin(path))
    assert message in str(error.value)


def test_a_single_file_has_no_splits(tmp_path):
    path = lines(tmp_path, {"prompt": "a"})
    for options in ({"split": "test"}, {"subset": "main"}):
        with pytest.raises(ConfigError, match="is one file; it has no splits"):
            locate_data(Origin(path, **options))


def test_a_name_with_an_owner_that_is_no_folder_here_is_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate_data(Origin("openai/gsm8k")).kind == "hub"
    (tmp_path / "openai").mkdir()
    with pytest.raises(ConfigError, match="openai/gsm8k does not exist"):
        locate_data(Origin("openai/gsm8k"))


def test_a_gzipped_file_written_elsewhere_is_read(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write('{"prompt": "a"}\n')
    assert prompts(read_rows_of(tmp_path / "a.jsonl.gz")[0]) == ["a"]
