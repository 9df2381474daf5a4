"""What is known of a configuration's data before a run."""

import json
from pathlib import Path

import pytest
from tokenizers import processors

from launch import datasets
from launch.tools.local_data import find_missing_bos, find_missing_end
from rlsys.checks import load_checked
from rlsys.models.config_json import ModelLimits
from rlsys.tasks import zigzag


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A model directory whose tokenizer begins texts with <bos>, and two sets of prompts: chats and texts."""
    monkeypatch.chdir(tmp_path)
    tokenizer = zigzag.make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    special = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=special
    )
    tokenizer.chat_template = "{{ messages[0].content }}>"
    tokenizer.save_pretrained("model")
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "12"}]}) + "\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("1>", "12345>", "123>")))
    (tmp_path / "some.yaml").write_text(
        "model: {path: model}\ndata: {train: texts.jsonl}\neval: {datasets: chats.jsonl}\nrollout: {max_new_tokens: 8}\n"
    )
    return lambda *overrides: load_checked("some.yaml", overrides)


def test_sets_without_the_bos_token_are_named_before_a_run_and_at_its_start(config):
    [warning] = find_missing_bos(config())
    assert warning.startswith("chats.jsonl: prompts do not begin with <bos>")
    from transformers import AutoTokenizer

    notes: list[str] = []
    datasets.load(config(), AutoTokenizer.from_pretrained("model"), ModelLimits(64), notes.append)
    assert [note for note in notes if "<bos>" in note] == [warning]


def test_a_tokenizer_without_bos_or_that_is_not_here_gives_no_warning(config):
    assert find_missing_bos(config("model.path=builtin:tiny")) == []
    assert find_missing_bos(config("model.path=some/model")) == []


def test_validate_prints_the_warning(config, rlsys, tmp_path):
    here = [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/texts.jsonl",
        f"eval.datasets={tmp_path}/chats.jsonl",
    ]
    done = rlsys("validate", tmp_path / "some.yaml", *here)
    assert done.returncode == 0, done.stderr
    assert f"warning: {tmp_path}/chats.jsonl: prompts do not begin with <bos>" in done.stdout
    assert done.stdout.count("warning: ") == 1


def test_validate_shows_the_first_prompt_of_each_set_with_tokens_and_notes_or_why_it_is_refused(
    config, rlsys, tmp_path
):
    here = [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/texts.jsonl",
        f"eval.datasets={tmp_path}/chats.jsonl",
    ]
    done = rlsys("validate", tmp_path / "some.yaml", *here, "--show")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/texts.jsonl: the first prompt, 3 tokens\n1>\n'<bos>' '1' '>'" in done.stdout
    assert f"{tmp_path}/chats.jsonl: the first prompt, 3 tokens\n12>\n'1' '2' '>'\nwarning: " in done.stdout
    answered = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "21"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": answered}) + "\n")
    refused = rlsys("validate", tmp_path / "some.yaml", *here, "--show")
    assert refused.returncode == 2
    assert "the messages end with the assistant's, '21'" in refused.stderr


def test_a_template_that_ends_turns_where_no_completion_ends_is_named(config):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '<end>' }}{% endfor %}"
    tokenizer.save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 64}')
    end = tokenizer.convert_tokens_to_ids("<end>")
    [warning] = find_missing_end(config())
    assert warning.endswith(f"Give rollout.stop_token_ids: [{end}].")
    assert find_missing_end(config(f"rollout.stop_token_ids=[{end}]")) == []
    assert find_missing_end(config("eval.datasets={}")) == [], "no prompt is a chat"
    assert find_missing_end(config("model.path=builtin:tiny")) == []
