"""Data sets from file to prompts: selection, notes, uids."""

import json
import re

import pytest
from data_files import lines, load, refused, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys import data
from rlsys.data import Origin, PromptFormat
from rlsys.data.prepare import to_canonical_json
from rlsys.data.store import JoinedPrompts, count_occurrences
from rlsys.errors import ConfigError
from rlsys.tasks import zigzag


@pytest.fixture(scope="module")
def tokenizer():
    return zigzag.make_tokenizer()


# --- rows become prompts ---------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_prompt_with_its_other_fields(tmp_path, tokenizer):
    [prompt] = load(lines(tmp_path, {"prompt": "12>", "answer": "21", "level": 3}), tokenizer)
    assert re.fullmatch("sums:[0-9a-f]{12}", prompt.uid)
    assert (prompt.source, prompt.text, prompt.tokens) == ("sums", "12>", [3, 4, 12])
    assert prompt.row == {"answer": "21", "level": 3}
    assert (prompt.messages, prompt.rewards) == (None, "")


def test_a_row_may_name_its_source_and_the_configuration_has_the_last_word(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1>", "source": "easy"}, {"prompt": "2>"})
    assert [p.source for p in load(path, tokenizer)] == ["easy", "sums"]
    assert [p.source for p in load(path, tokenizer, source="both")] == ["both", "both"]


def test_prompt_and_answer_may_be_under_other_names(tmp_path, tokenizer):
    path = lines(tmp_path, {"question": "1>", "prompt": "kept", "solution": "4"})
    [prompt] = load(path, tokenizer, prompt_key="question", answer_key="solution")
    assert prompt.text == "1>"
    assert prompt.row == {"prompt": "kept", "solution": "4", "answer": "4"}


def test_prompt_and_answer_may_be_within_other_fields(tmp_path, tokenizer):
    rows = [{"extra": {"question": "1>"}, "reward_model": {"ground_truth": "4", "style": "rule"}}]
    keys = {"prompt_key": "extra.question", "answer_key": "reward_model.ground_truth"}
    for path in (lines(tmp_path, *rows), table(tmp_path, rows)):
        [prompt] = load(path, tokenizer, **keys)
        assert (prompt.text, prompt.row["answer"], prompt.row["reward_model"]["style"]) == ("1>", "4", "rule")


def test_a_field_that_has_a_dot_in_its_name_is_itself(tmp_path, tokenizer):
    [prompt] = load(lines(tmp_path, {"a.b": "1>", "a": {"b": "2>"}}), tokenizer, prompt_key="a.b")
    assert prompt.text == "1>"


@pytest.mark.parametrize("row", [{"prompt": "1>"}, {"prompt": "1>", "answer": None}])
def test_a_row_without_an_answer_is_a_prompt_without_an_answer(tmp_path, tokenizer, row):
    [prompt] = load(lines(tmp_path, row), tokenizer)
    assert "answer" not in prompt.row


def test_an_answer_that_is_not_a_number_is_a_bad_row(tmp_path, tokenizer):
    problems = refused(lines(tmp_path, '{"prompt": "1>", "answer": NaN}'), tokenizer)
    assert "sums.jsonl:1: the answer (`answer`) is NaN" in problems[0]


def test_parquet_rows_are_rows(tmp_path, tokenizer):
    path = table(tmp_path, [{"prompt": "12>", "answer": 12}, {"prompt": "3>", "answer": 3}])
    first, second = load(path, tokenizer)
    assert (first.tokens, first.row) == ([3, 4, 12], {"answer": 12})
    assert (second.text, second.row) == ("3>", {"answer": 3})


def test_the_built_in_task_can_be_loaded(tokenizer):
    train = load("builtin:zigzag", tokenizer)
    assert len(train) == zigzag.TRAIN_PROMPTS
    assert train.longest_prompt == 7
    assert all(len(p.tokens) == 7 for p in train)


# --- uids ------------------------------------------------------------------------------------------------------------------


def test_a_uid_is_of_the_row_and_its_source_whatever_stands_around_it(tmp_path, tokenizer):
    row = {"prompt": "1>", "answer": "2"}
    [only] = load(lines(tmp_path, row), tokenizer)
    among = load(lines(tmp_path, {"prompt": "3>"}, "", {"answer": "2", "prompt": "1>"}, name="SUMS.jsonl"), tokenizer)
    [column] = load(table(tmp_path, [row | {"level": None}]), tokenizer)
    assert among[1].uid == column.uid == only.uid
    assert among[0].uid != only.uid
    [renamed] = load(lines(tmp_path, row, name="other.jsonl"), tokenizer)
    assert renamed.uid == only.uid.replace("sums", "other")


def test_a_uid_does_not_depend_on_the_kind_of_file(tmp_path):
    chat = zigzag.make_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    rows = [
        {"prompt": [{"role": "user", "content": "1"}], "answer": {"value": 2.5}, "more": None},
        {"prompt": [{"role": "user", "content": "2", "name": "ann"}], "answer": None, "more": ["a", "b"]},
    ]
    bare = [{k: v for k, v in row.items() if v is not None} for row in rows]
    (tmp_path / "a.json").write_text(json.dumps(bare))
    paths = [lines(tmp_path, *bare, name="a.jsonl"), table(tmp_path, rows, name="a.parquet"), str(tmp_path / "a.json")]
    one, two, three = ([p.uid for p in load(path, chat)] for path in paths)
    assert one == two == three


def test_identical_rows_are_numbered_and_repeated_prompts_are_told(tmp_path, tokenizer):
    rows = [{"prompt": "1>"}, {"prompt": "2>"}, {"prompt": "1>"}, {"prompt": "1>"}, {"prompt": "1>", "answer": "x"}]
    notes = []
    uids = [p.uid for p in load(lines(tmp_path, *rows), tokenizer, notes=notes)]
    assert [uid.partition("~")[2] for uid in uids] == ["", "", "2", "3", ""]
    assert len({uid.partition("~")[0] for uid in uids}) == 3
    assert "5 prompts; 3 repeat an earlier prompt" in notes[0]


def test_a_row_that_is_in_two_sets_has_two_uids(tmp_path, tokenizer):
    one = load(lines(tmp_path, {"prompt": "1>"}, {"prompt": "2>"}), tokenizer, source="a")
    two = load(lines(tmp_path, {"prompt": "2>"}, {"prompt": "3>"}, name="more.jsonl"), tokenizer, source="a")
    joined = JoinedPrompts([one, two])
    uids = [p.uid for p in joined]
    assert [p.text for p in joined] == ["1>", "2>", "2>", "3>"]
    assert uids[2] == f"{uids[1]}~2"
    assert len(set(uids)) == 4
    assert [p.text for p in joined[1:3]] == ["2>", "2>"]
    assert joined[-1].text == "3>"


@given(st.lists(st.integers(0, 5)))
def test_repetitions_are_counted_as_by_hand(numbers):
    import numpy as np

    by_hand = [numbers[: i + 1].count(n) for i, n in enumerate(numbers)]
    assert count_occurrences(np.array(numbers, dtype=np.uint64)).tolist() == by_hand


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.randoms())
def test_the_order_of_fields_and_empty_fields_do_not_change_what_a_row_is(row, random):
    items = list(row.items())
    random.shuffle(items)
    assert to_canonical_json(dict(items)) == to_canonical_json(row)
    assert (
        to_canonical_json({"nothing": None} | row)
        == to_canonical_json({k: v for k, v in row.items() if k != "nothing"})
        or "nothing" in row
    )
    assert json.loads(to_canonical_json(row)).keys() == {k for k, v in row.items() if v is not None}


# --- rows that cannot be used ----------------------------------------------------------------------------------------------


def test_every_bad_row_is_told_at_once_with_file_line_and_reason(tmp_path, tokenizer):
    rows = [
        '{"prompt": }',
        {"prompt": "1>"},
        {"question": "2>", "answer": "2"},
        '["1>"]',
        {"prompt": ""},
        {"prompt": 3},
    ]
    problems = refused(lines(tmp_path, *rows), tokenizer)
    assert [line.rpartition("sums.jsonl:")[2][:2] for line in problems[:-1]] == ["1:", "3:", "4:", "5:", "6:"]
    assert "not JSON: Expecting value at column 12" in problems[0]
    assert "the row has no field `prompt`; it has question, answer. Set data.prompt_key" in problems[1]
    assert "a row is an object such as" in problems[2]
    assert (
        "5 of 6 rows cannot be used (2 not a prompt, 1 not JSON, 1 without a prompt, 1 not an object)" in problems[-1]
    )
    assert "data.on_bad_row=skip" in problems[-1]


def test_of_many_bad_rows_ten_are_told(tmp_path, tokenizer):
    problems = refused(lines(tmp_path, {"prompt": "1>"}, *["nonsense"] * 50), tokenizer)
    assert len(problems) == 11
    assert "50 of 51 rows cannot be used (50 not JSON)" in problems[-1]


def test_bad_rows_can_be_left_out_and_are_counted_and_listed(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1>"}, "nonsense", {"prompt": "2>"}, {"prompt": None}, {"prompt": 4}, "[]")
    notes = []
    rows = load(path, tokenizer, on_bad_row="skip", notes=notes)
    assert [p.text for p in rows] == ["1>", "2>"]
    assert (
        "2 prompts; left out 4 of 6 rows that cannot be used (2 not a prompt, 1 not JSON, 1 not an object)" in notes[0]
    )
    assert [n.strip().removeprefix(path)[:3] for n in notes[1:-1]] == [":2:", ":4:", ":5:"]
    assert notes[-1].strip() == "and 1 more"
    assert data.write_bad_rows(tmp_path / "bad.jsonl", [rows.stored]) == 4
    listed = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [b["line"] for b in listed] == [2, 4, 5, 6]
    assert (listed[0]["file"], listed[0]["reason"]) == (path, "not JSON")


def test_a_set_of_which_everything_is_bad_is_an_error_all_the_same(tmp_path, tokenizer):
    problems = refused(lines(tmp_path, "nonsense", '{"prompt": 3}'), tokenizer, on_bad_row="skip")
    assert "sums.jsonl:1: not JSON" in problems[0]
    assert "holds no prompts: none of its 2 rows can be used (1 not JSON, 1 not a prompt)" in problems[-1]


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet", "empty.csv", "empty.json"])
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_file_without_rows_is_refused(tmp_path, tokenizer, name, on_bad_row):
    path = table(tmp_path, [], name) if name.endswith("parquet") else lines(tmp_path, name=name)
    [problem] = refused(path, tokenizer, on_bad_row=on_bad_row)
    assert "holds no prompts; it is empty" in problem


@pytest.mark.parametrize(
    "prompt", ["", " \n", None, 3, [], ["text"], [{"role": "user"}], [{"role": "user", "content": ""}], "\ud800"]
)
def test_what_is_neither_text_nor_messages_is_a_bad_row(tmp_path, tokenizer, prompt):
    path = lines(tmp_path, {"prompt": "1>"}, {"prompt": prompt})
    problems = refused(path, tokenizer)
    assert "sums.jsonl:2: " in problems[0]
    assert [p.text for p in load(path, tokenizer, on_bad_row="skip")] == ["1>"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.integers(0, 19), st.sampled_from([b"\xff", b"{", b"[1]", b"7", b'{"prompt": 1}', b"\x00", b'{"prompt":"1>"'])
    )
)
def test_damage_at_any_line_never_costs_another_row(tmp_path, tokenizer, damage):
    whole = [json.dumps({"prompt": f"{n:02}>"}).encode() for n in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(damage.get(n, line) for n, line in enumerate(whole)) + b"\n")
    if len(damage) == 20:
        assert refused(str(tmp_path / "a.jsonl"), tokenizer, on_bad_row="skip")
        return
    rows = load(str(tmp_path / "a.jsonl"), tokenizer, on_bad_row="skip")
    assert [p.text for p in rows] == [f"{n:02}>" for n in range(20) if n not in damage]
    assert [bad.line for bad in rows.stored.read_all_bad()] == [n + 1 for n in sorted(damage)]


# --- prompts that are too long ---------------------------------------------------------------------------------------------


def test_an_overlong_prompt_is_an_error_with_both_numbers(tmp_path, tokenizer):
    [problem] = refused(lines(tmp_path, {"prompt": "1>"}, {"prompt": "12345678>"}), tokenizer)
    assert "sums.jsonl:2: the prompt has 9 tokens; at most 7 fit (rollout.max_prompt_tokens)" in problem
    assert "data.overlong=skip" in problem


def test_of_many_overlong_prompts_ten_are_told(tmp_path, tokenizer):
    problems = refused(lines(tmp_path, *[{"prompt": "12345678" + "9" * n} for n in range(30)]), tokenizer)
    assert len(problems) == 11
    assert "20 more prompts are too long; the longest has 37 tokens" in problems[-1]


def test_overlong_prompts_can_be_left_out_and_are_counted(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1>"}, {"prompt": "12345678>"}, {"prompt": "123456>"})
    notes = []
    rows = load(path, tokenizer, overlong="skip", notes=notes)
    assert [p.text for p in rows] == ["1>", "123456>"]
    assert rows.longest_prompt == 7
    assert "2 prompts; left out 1 of more than 7 tokens" in notes[0]


def test_leaving_out_everything_is_refused(tmp_path, tokenizer):
    [problem] = refused(lines(tmp_path, {"prompt": "12345678>"}), tokenizer, overlong="skip")
    assert "all 1 are longer than 7 tokens" in problem


def test_held_out_prompts_that_are_trained_on_are_told(tmp_path, tokenizer):
    train = load(lines(tmp_path, {"prompt": "1>"}, {"prompt": "2>"}), tokenizer)
    held_out = load(
        lines(tmp_path, {"prompt": "2>", "answer": "other"}, {"prompt": "3>"}, name="test.jsonl"), tokenizer
    )
    assert "test: 1 of 2 held-out prompts are also trained on" in data.describe_contamination("test", held_out, [train])
    assert not data.describe_contamination("train", train, [load(lines(tmp_path, {"prompt": "9>"}), tokenizer)])


# --- a first look ----------------------------------------------------------------------------------------------------------


def peek(path, on_bad_row="error", **form):
    data.peek(Origin(path), PromptFormat(**form), on_bad_row)


def test_a_first_look_finds_what_is_wrong_with_every_row(tmp_path):
    with pytest.raises(ConfigError, match=r"sums\.jsonl:1: the row has no field `prompt`"):
        peek(lines(tmp_path, {"question": "1>"}))
    with pytest.raises(ConfigError, match="it is empty"):
        peek(lines(tmp_path))
    with pytest.raises(ConfigError, match="none of its rows can be used"):
        peek(lines(tmp_path, {"question": "1>"}), "skip")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        peek(lines(tmp_path, "nonsense", name="bad.parquet"))


def test_a_first_look_reads_no_further(tmp_path):
    peek(lines(tmp_path, {"question": "1>"}, "not json"), prompt_key="question")
    peek("builtin:zigzag")


def test_a_first_look_passes_over_bad_rows_that_may_be_left_out(tmp_path):
    peek(lines(tmp_path, "nonsense", {"question": "1>"}, {"prompt": "1>"}), "skip")
