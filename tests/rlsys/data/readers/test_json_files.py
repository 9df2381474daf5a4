"""Readers of JSON, plain and compressed, and what they make of damaged files."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from data_files import lines, prompts, read_rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


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


def test_a_gzipped_file_written_elsewhere_is_read(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write('{"prompt": "a"}\n')
    assert prompts(read_rows_of(tmp_path / "a.jsonl.gz")[0]) == ["a"]
