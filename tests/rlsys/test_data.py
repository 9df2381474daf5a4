import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from fakes import make_dataset

from rlsys import data, tiny
from rlsys.config import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return tokenizer


def lines(tmp_path, *rows, name: str = "sums.jsonl") -> str:
    file = tmp_path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def load(path, tokenizer, **options):
    return data.load(path, tokenizer, **({"prompt_key": "prompt", "max_prompt_tokens": 7} | options))


def test_a_row_becomes_a_prompt_with_its_other_fields(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "12>", "answer": "21", "level": 3})
    [prompt] = load(path, tokenizer).prompts
    assert (prompt.uid, prompt.source, prompt.text) == ("sums:1", "sums", "12>")
    assert prompt.tokens == [3, 4, 12]
    assert prompt.row == {"answer": "21", "level": 3}


def test_a_row_may_name_its_source(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1>", "source": "easy"}, {"prompt": "2>"})
    assert [p.source for p in load(path, tokenizer).prompts] == ["easy", "sums"]


def test_empty_lines_are_passed_over_and_counted(tmp_path, tokenizer):
    path = lines(tmp_path, "", {"prompt": "1>"}, "  ", {"prompt": "2>"})
    assert [p.uid for p in load(path, tokenizer).prompts] == ["sums:2", "sums:4"]


def test_the_prompt_may_be_under_another_name(tmp_path, tokenizer):
    path = lines(tmp_path, {"question": "1>", "prompt": "kept"})
    [prompt] = load(path, tokenizer, prompt_key="question").prompts
    assert prompt.text == "1>"
    assert prompt.row == {"prompt": "kept"}


def test_parquet_rows_are_rows(tmp_path, tokenizer):
    path = tmp_path / "sums.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["12>", "3>"], "answer": [12, 3]}), path)
    first, second = load(str(path), tokenizer).prompts
    assert (first.uid, first.tokens, first.row) == ("sums:1", [3, 4, 12], {"answer": 12})
    assert (second.uid, second.text, second.row) == ("sums:2", "3>", {"answer": 3})


def test_chat_messages_in_parquet_go_through_the_template(tmp_path, chat_tokenizer):
    path = tmp_path / "chat.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [[{"role": "user", "content": "12"}]]}), path)
    [prompt] = load(str(path), chat_tokenizer).prompts
    assert (prompt.text, prompt.tokens) == ("12>", [3, 4, 12])


def test_the_built_in_task_can_be_loaded(tokenizer):
    train = load("builtin:zigzag", tokenizer)
    assert len(train) == tiny.TRAIN_PROMPTS
    assert train.prompts[0].uid == "zigzag:1"
    assert all(len(p.tokens) == 7 for p in train.prompts)


# --- what is wrong is said with file and line -----------------------------------------------------------------------------


def problem(path, tokenizer, **options) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, tokenizer, **options)
    return str(error.value)


def test_a_row_without_a_prompt_is_refused_with_its_line_and_fields(tmp_path, tokenizer):
    said = problem(lines(tmp_path, {"prompt": "1>"}, {"question": "2>", "answer": "2"}), tokenizer)
    assert "sums.jsonl:2: the row has no field `prompt`; it has question, answer" in said
    assert "data.prompt_key" in said


def test_a_line_that_is_not_json_is_refused_with_its_column(tmp_path, tokenizer):
    assert "sums.jsonl:2: not JSON: " in problem(lines(tmp_path, {"prompt": "1>"}, '{"prompt": }'), tokenizer)
    assert "at column 12" in problem(lines(tmp_path, '{"prompt": }'), tokenizer)


def test_a_line_that_is_not_text_is_refused(tmp_path, tokenizer):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "1>"}\n{"prompt": "\xe9>"}\n')
    assert "latin.jsonl:2: not UTF-8" in problem(str(file), tokenizer)


def test_a_row_that_is_not_an_object_is_refused(tmp_path, tokenizer):
    assert "sums.jsonl:1: a row is an object" in problem(lines(tmp_path, '["1>"]'), tokenizer)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet"])
def test_a_file_without_rows_is_refused(tmp_path, tokenizer, name):
    path = lines(tmp_path, name=name)
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert "holds no prompts; it is empty" in problem(path, tokenizer)


def test_a_damaged_parquet_file_is_refused(tmp_path, tokenizer):
    assert "not a readable parquet file" in problem(lines(tmp_path, "nonsense", name="bad.parquet"), tokenizer)


@pytest.mark.parametrize("prompt", ["", None, 3, [], ["text"], [{"role": "user"}]])
def test_what_is_neither_text_nor_messages_is_refused(tmp_path, chat_tokenizer, prompt):
    said = problem(lines(tmp_path, {"prompt": "1>"}, {"prompt": prompt}), chat_tokenizer)
    assert "sums.jsonl:2: a prompt is a text or a list of {role, content} messages" in said


def test_messages_without_a_chat_template_are_refused(tmp_path, tokenizer):
    said = problem(lines(tmp_path, {"prompt": [{"role": "user", "content": "1"}]}), tokenizer)
    assert "sums.jsonl:1" in said
    assert "no chat template" in said


def test_what_the_chat_template_refuses_is_refused_with_its_line(tmp_path, chat_tokenizer):
    rows = [{"prompt": [{"role": role, "content": "1"}]} for role in ("user", "system")]
    said = problem(lines(tmp_path, *rows), chat_tokenizer)
    assert "sums.jsonl:2" in said
    assert "no system messages" in said


def test_an_overlong_prompt_is_an_error_with_both_numbers(tmp_path, tokenizer):
    said = problem(lines(tmp_path, {"prompt": "1>"}, {"prompt": "12345678>"}), tokenizer)
    assert "sums.jsonl:2: the prompt has 9 tokens; at most 7 fit (rollout.max_prompt_tokens)" in said
    assert "data.overlong=skip" in said


def test_overlong_prompts_can_be_left_out_and_are_counted(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1>"}, {"prompt": "12345678>"}, {"prompt": "123456>"})
    loaded = load(path, tokenizer, overlong="skip")
    assert [p.uid for p in loaded.prompts] == ["sums:1", "sums:3"]
    assert loaded.skipped == 1


def test_leaving_out_everything_is_refused(tmp_path, tokenizer):
    said = problem(lines(tmp_path, {"prompt": "12345678>"}), tokenizer, overlong="skip")
    assert "all 1 are longer than 7 tokens" in said


# --- the order -------------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_prompt_once():
    taken = make_dataset(12).take(0, 36)
    for epoch in range(3):
        rows = [p.text for p in taken[12 * epoch : 12 * epoch + 12]]
        assert len(set(rows)) == 12


def test_each_epoch_has_its_own_order_and_each_seed_too():
    texts = [p.text for p in make_dataset(12).take(0, 24)]
    assert texts[:12] != texts[12:]
    assert texts[:12] != [p.text for p in make_dataset(12, seed=1).take(0, 12)]


def test_the_order_depends_on_seed_and_position_only():
    whole = make_dataset(12).take(0, 60)
    jumping = make_dataset(12)
    for position, count in ((40, 9), (0, 5), (11, 3), (23, 30), (40, 9)):
        assert jumping.take(position, count) == whole[position : position + count]


def test_without_shuffling_prompts_come_as_in_the_file():
    dataset = make_dataset(5, shuffle=False)
    assert [p.uid.split("#")[0] for p in dataset.take(3, 5)] == [dataset.prompts[i].uid for i in (3, 4, 0, 1, 2)]


def test_every_use_of_a_row_has_its_own_uid():
    uids = Counter(p.uid for p in make_dataset(5).take(0, 30))
    assert max(uids.values()) == 1
    assert "zigzag:3#0" in uids
    assert "zigzag:3#5" in uids


# --- a first look ----------------------------------------------------------------------------------------------------------


def test_a_first_look_finds_what_is_wrong_with_every_row(tmp_path):
    with pytest.raises(ConfigError, match=r"sums\.jsonl:1: the row has no field `prompt`"):
        data.peek(lines(tmp_path, {"question": "1>"}), "prompt")
    with pytest.raises(ConfigError, match="it is empty"):
        data.peek(lines(tmp_path), "prompt")


def test_a_first_look_reads_no_further(tmp_path):
    data.peek(lines(tmp_path, {"question": "1>"}, "not json"), "question")
    data.peek("builtin:zigzag", "prompt")
