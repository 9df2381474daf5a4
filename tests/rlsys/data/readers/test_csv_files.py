"""The reader of CSV."""

import csv

import pytest
from data_files import prompts, read_rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


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
