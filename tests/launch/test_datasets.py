"""Data sets of a configuration: how they are read, mixed and checked."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from launch import datasets
from rlsys.checks import load_checked
from rlsys.config.schema import Config, EpisodeConfig, EvalConfig, HeldOutSource
from rlsys.errors import ConfigError
from rlsys.models.config_json import ModelLimits
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.tasks import zigzag


@pytest.fixture(scope="module")
def tokenizer():
    return zigzag.make_tokenizer()


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read({"train": …}, …)`: a configuration with these options in `data` and `eval`, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def read(data, held_out=None, **more):
        tree = {"data": data, "eval": {"datasets": held_out or {}}, "rollout": {"max_new_tokens": 8}} | more
        (tmp_path / "some.yaml").write_text(json.dumps(tree))
        return load_checked("some.yaml")

    return read


def lines(name, *rows):
    with open(name, "w") as out:
        out.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def numbered(first, count):
    return [{"prompt": f"{n:03}>"} for n in range(first, first + count)]


def load(config, tokenizer, folder=None, window=15, vocabulary=0):
    notes = []
    return datasets.load(config, tokenizer, ModelLimits(window, vocabulary), notes.append, folder), notes


def test_a_mixed_set_with_corrupt_rows_is_loaded(read, tokenizer, tmp_path):
    lines("a.jsonl", *numbered(0, 30), "{", {"question": "1>"}, *numbered(30, 10))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([*numbered(100, 9), {"prompt": None}, *numbered(110, 10)]),
        "b.parquet",
        row_group_size=10,
    )
    start = pyarrow.parquet.ParquetFile("b.parquet").metadata.row_group(1).column(0).dictionary_page_offset
    with open("b.parquet", "r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * 40)
    config = read({"train": {"a.jsonl": 3, "b.parquet": 1}, "on_bad_row": "skip"})
    datasets.peek(config)
    loaded, notes = load(config, tokenizer, tmp_path)
    assert (len(loaded.train), loaded.longest_sequence) == (49, 4 + 8)
    assert sum(p.source == "b" for p in loaded.train.take(0, 1000)) == 250
    assert notes[0] == "a.jsonl: 40 prompts; left out 2 of 42 rows that cannot be used (1 not JSON, 1 without a prompt)"
    assert "b.parquet: 9 prompts; left out 11 of 20 rows" in notes[3]
    assert f"4 bad rows are listed in {tmp_path}/bad_rows.jsonl" in notes[-3]
    assert [note.partition(",")[0] for note in notes[-2:]] == [
        "a.jsonl: 75.0% of the prompts",
        "b.parquet: 25.0% of the prompts",
    ]
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [(b["file"], b["line"], b["rows"]) for b in listed] == [
        ("a.jsonl", 31, 1),
        ("a.jsonl", 32, 1),
        ("b.parquet", 10, 1),
        ("b.parquet", 11, 10),
    ]
    with pytest.raises(ConfigError) as error:
        load(read({"train": {"a.jsonl": 3, "b.parquet": 1}}), tokenizer)
    assert len(error.value.problems) == 6, "problems of both sets are raised together"


def test_sets_without_weights_give_each_row_once_an_epoch(read, tokenizer):
    lines("a.jsonl", *numbered(0, 5))
    lines("b.jsonl", *numbered(100, 3))
    loaded, _ = load(read({"train": ["a.jsonl", "b.jsonl"]}), tokenizer)
    assert sorted(p.text for p in loaded.train.take(8, 8)) == sorted(
        r["prompt"] for r in [*numbered(0, 5), *numbered(100, 3)]
    )
    ordered, _ = load(read({"train": ["a.jsonl", "b.jsonl"], "shuffle": False}), tokenizer)
    assert [p.text[:3] for p in ordered.train.take(0, 8)] == ["000", "001", "002", "003", "004", "100", "101", "102"]


def test_each_set_may_have_its_own_form(read, tokenizer):
    lines("a.jsonl", {"q": "1>", "gold": {"value": "7"}})
    lines("b.jsonl", {"prompt": "2>", "answer": "8"})
    loaded, _ = load(
        read(
            {
                "train": {
                    "first": {
                        "path": "a.jsonl",
                        "prompt_key": "q",
                        "answer_key": "gold.value",
                        "source": "A",
                        "reward": "contains",
                    },
                    "b.jsonl": None,
                },
                "shuffle": False,
            },
            reward={"functions": "exact"},
        ),
        tokenizer,
    )
    one, two = loaded.train.take(0, 2)
    assert (one.source, one.row["answer"], one.rewards) == ("A", "7", "first")
    assert (two.source, two.row["answer"], two.rewards) == ("b", "8", "")


def test_a_set_may_have_options_for_its_template_and_a_limit_of_its_own(read, tokenizer):
    tokenizer = zigzag.make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ 0 if zero }}{{ 9 if nine }}"
    for name in ("a.jsonl", "b.jsonl"):
        lines(name, {"prompt": [{"role": "user", "content": "1"}]})
    sets = {"a.jsonl": None, "b.jsonl": {"template_options": {"nine": True}, "max_new_tokens": 5}}
    held_out = {"b.jsonl": sets["b.jsonl"]}
    config = read({"train": sets, "template_options": {"zero": True}, "shuffle": False}, held_out)
    loaded, _ = load(config, tokenizer)
    first, second = loaded.train.take(0, 2)
    assert (first.text, second.text) == ("10", "19")
    assert (first.max_new_tokens, second.max_new_tokens) == (0, 5)
    requests = SamplingPlan.from_config(config).requests(0, 1, [first, second])
    assert {(r.uid, r.max_new_tokens) for r in requests} == {(first.uid, 8), (second.uid, 5)}
    assert [(p.text, p.max_new_tokens) for p in loaded.held_out[0].prompts] == [("19", 0)]
    assert loaded.held_out[0].max_new_tokens == 5


def test_a_set_may_continue_its_final_messages_where_others_do_not(read, tokenizer):
    begun = zigzag.make_tokenizer()
    begun.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    lines("a.jsonl", {"prompt": [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]})
    lines("b.jsonl", {"prompt": [{"role": "user", "content": "45"}]})
    open_end = {"path": "a.jsonl", "continue_final_message": True}
    loaded, _ = load(read({"train": {"a": open_end}}, {"b": {"path": "b.jsonl"}, "c": open_end}), begun)
    assert [p.text for p in (loaded.train[0], *(h.prompts[0] for h in loaded.held_out))] == ["123", "45>", "123"]
    with pytest.raises(ConfigError, match=r"set data\.continue_final_message"):
        load(read({"train": {"a": open_end}}, {"c": open_end | {"continue_final_message": False}}), begun)


def test_held_out_sets_have_their_own_samples_and_temperature(read, tokenizer):
    lines("a.jsonl", *numbered(0, 2))
    held_out = {"zigzag": {"path": "builtin:zigzag_heldout"}, "a.jsonl": {"samples": 4, "temperature": 0.5}}
    held_out["a.jsonl"]["max_new_tokens"] = 10
    config = read({"train": "builtin:zigzag"}, held_out)
    loaded, notes = load(config, tokenizer)
    assert [(h.name, len(h.prompts), h.samples, h.temperature, h.max_new_tokens) for h in loaded.held_out] == [
        ("zigzag", 256, 1, 0.0, 8),
        ("a.jsonl", 2, 4, 0.5, 10),
    ]
    assert loaded.longest_sequence == 7 + 8, "of zigzag; a.jsonl has 4 + 10"
    assert notes == ["a.jsonl: 2 prompts"]
    one = datasets.load_held_out(config, "a.jsonl", tokenizer, ModelLimits(15), notes.append)
    assert one.longest_sequence == 4 + 10
    assert (one.name, list(one.prompts), one.samples) == ("a.jsonl", list(loaded.held_out[1].prompts), 4)


def test_a_row_with_a_token_that_the_model_lacks_is_named_also_of_a_held_out_set(read):
    tokenizer = zigzag.make_tokenizer()  # of 13 tokens
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    lines("a.jsonl", *numbered(0, 3), {"prompt": "12<|tool|>3>"})
    lines("b.jsonl", {"prompt": "<|tool|>1>"}, *numbered(5, 2))
    config = read({"train": "a.jsonl"}, "b.jsonl")
    assert len(load(config, tokenizer, vocabulary=14)[0].train) == 4
    with pytest.raises(ConfigError) as error:
        load(config, tokenizer, vocabulary=13)
    named = "the prompt has `<|tool|>`, token 13 of the tokenizer, and the model's 13 tokens end at 12."
    unusable = "cannot be used (1 with tokens that the model lacks). Correct them, or leave them out with data.on_bad_row=skip."
    assert error.value.problems == [
        *(f"a.jsonl:4: {named}", f"a.jsonl: 1 of 4 rows {unusable}"),
        *(f"b.jsonl:1: {named}", f"b.jsonl: 1 of 3 rows {unusable}"),
    ]
    loaded, _ = load(read({"train": "a.jsonl", "on_bad_row": "skip"}, "b.jsonl"), tokenizer, vocabulary=13)
    assert (len(loaded.train), len(loaded.held_out[0].prompts)) == (3, 2)


def test_prompts_that_several_sets_share_are_noted(read, tokenizer):
    lines("a.jsonl", *numbered(0, 5), *numbered(0, 2))
    lines("b.jsonl", *numbered(3, 5))
    _, notes = load(read({"train": ["a.jsonl", "b.jsonl"]}), tokenizer)
    assert notes == [
        "a.jsonl: 7 prompts; 2 repeat an earlier prompt",
        "b.jsonl: 5 prompts",
        "data.train: 2 prompts are in another set too",
    ]


def test_held_out_prompts_that_are_trained_on_are_noted(read, tokenizer):
    lines("a.jsonl", *numbered(0, 10))
    lines("b.jsonl", *numbered(8, 10))
    _, notes = load(read({"train": "a.jsonl"}, "b.jsonl"), tokenizer)
    assert notes[-1] == "b.jsonl: 2 of 10 held-out prompts are also trained on; accuracy on them is no test"


def test_a_file_for_training_and_evaluation_is_noted_once(read, tokenizer):
    lines("a.jsonl", *numbered(0, 10))
    _, notes = load(read({"train": "a.jsonl"}, "a.jsonl"), tokenizer)
    assert notes[0] == "a.jsonl: 10 prompts"
    assert "10 of 10 held-out prompts" in notes[1]


def test_the_window_limits_prompts_if_no_option_does(read, tokenizer):
    lines("a.jsonl", {"prompt": "1>"}, {"prompt": "12345678>"})
    for window, most in ((15, 7), (16, 8)):
        with pytest.raises(ConfigError) as error:
            load(read({"train": "a.jsonl"}), tokenizer, window=window)
        assert f"a.jsonl:2: the prompt has 9 tokens; at most {most} fit (the model's window of {window} less" in str(
            error.value
        )
    assert len(load(read({"train": "a.jsonl"}), tokenizer, window=17)[0].train) == 2
    assert len(load(read({"train": "a.jsonl"}), tokenizer, window=0)[0].train) == 2
    with pytest.raises(ConfigError, match="no room for a prompt"):
        load(read({"train": "a.jsonl"}), tokenizer, window=8)


def test_peek_reports_the_problems_of_every_set(read):
    lines("a.jsonl", {"question": "1>"})
    lines("b.jsonl", "nonsense")
    with pytest.raises(ConfigError) as error:
        datasets.peek(read({"train": "a.jsonl"}, "b.jsonl"))
    assert [p[:10] for p in error.value.problems] == ["a.jsonl:1:", "b.jsonl:1:"]


@pytest.mark.parametrize("option", [{"weight": 1}, {"template": "gone.jinja"}, {"split": "test"}])
def test_wrong_settings_of_a_set_are_refused_before_it_is_read(read, option):
    lines("a.jsonl", *numbered(0, 2))
    with pytest.raises(ConfigError, match=r"weight|gone\.jinja does not exist|it has no splits"):
        read({"train": {"a.jsonl": option, "builtin:zigzag": None}})


@pytest.mark.parametrize(("model", "longest"), [(0, 40), (100, 40), (15, 15)])
def test_the_longest_episode_fills_its_window_and_at_most_that_of_the_model(model, longest):
    config = Config(episode=EpisodeConfig(play="my_game.py:play", window=40))
    assert datasets.longest_episode(config, model) == longest
    assert datasets.longest_episode(Config(), model) == 0, "single answers"
    of_a_set = Config(eval=EvalConfig(datasets={"a": HeldOutSource("a.jsonl", episode="my_game.py:play")}))
    assert datasets.longest_episode(of_a_set, model or 50) == (model or 50)
