"""The built-in task, tokenizer and model."""

import functools
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.tasks import zigzag


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A warm start of 25 steps, kept in `tmp_path`; returns how often it was made."""
    made = []
    make = functools.partial(zigzag.make_model, steps=25)

    def counted(folder, seed, **options):
        made.append(seed)
        make(folder, seed, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(zigzag, "make_model", counted)
    return made


@pytest.mark.parametrize(
    ("text", "right"), [("481625", True), ("814253", True), ("123456", False), ("132546", True), ("132465", False)]
)
def test_zigzag_rises_and_falls_by_turns(text, right):
    assert zigzag.is_zigzag(text) == right


def test_122_of_720_orders_are_right():
    assert sum(zigzag.is_zigzag("".join(p)) for p in itertools.permutations("024579")) == 122


def test_no_set_of_digits_is_both_learned_and_held_out():
    train, held_out = (zigzag.rows(name) for name in ("zigzag", "zigzag_heldout"))
    assert (len(train), len(held_out)) == (zigzag.TRAIN_PROMPTS, zigzag.HELD_OUT_PROMPTS)
    sets = [{"".join(sorted(row["prompt"].rstrip(">"))) for row in rows} for rows in (train, held_out)]
    assert not sets[0] & sets[1]
    assert len(sets[1]) == zigzag.HELD_OUT_SETS


def test_prompts_are_six_distinct_digits_and_never_repeat():
    prompts = [row["prompt"] for row in zigzag.rows("zigzag")]
    assert len(set(prompts)) == len(prompts)
    assert all(len(set(p)) == 7 and p.endswith(">") and p[:6].isdigit() for p in prompts)


def test_rows_are_always_the_same():
    assert zigzag.rows("zigzag") == zigzag.rows("zigzag")


def test_the_tokenizer_has_one_token_per_character():
    tokenizer = zigzag.make_tokenizer()
    ids = tokenizer.encode("864152>")
    assert ids == [10, 8, 6, 3, 7, 4, 12]
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == "864152>"
    assert tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0


def test_the_model_has_the_size_it_claims_and_follows_its_seed():
    a, again, other = zigzag.build_model(0), zigzag.build_model(0), zigzag.build_model(1)
    assert sum(p.numel() for p in a.parameters()) == 330_752
    assert torch.equal(a.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, other.lm_head.weight)


def test_the_warm_started_model_is_a_hugging_face_directory_made_once(quick):
    folder = zigzag.model_folder(3)
    assert zigzag.model_folder(3) == folder
    assert quick == [3]
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64
    assert AutoTokenizer.from_pretrained(folder).encode("12>") == [3, 4, 12]
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = model.lm_head.weight
    assert not torch.equal(trained, zigzag.build_model(3).lm_head.weight)
    assert not list(folder.parent.glob(".making-*"))


def test_a_warm_start_that_fails_leaves_nothing_behind(quick, monkeypatch, tmp_path):
    def fail(folder, seed, **options):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(zigzag, "make_model", fail)
    with pytest.raises(OSError, match="disk full"):
        zigzag.model_folder(0)
    assert list((tmp_path / "rlsys").iterdir()) == []


def test_who_comes_second_takes_the_model_of_who_came_first(quick, monkeypatch, tmp_path):
    make = zigzag.make_model

    def slow(folder, seed, **options):
        make(folder, seed, **options)
        final.mkdir()
        (final / "config.json").write_text('{"first": true}')

    final = zigzag.model_folder(0)
    for file in final.iterdir():
        file.unlink()
    final.rmdir()
    monkeypatch.setattr(zigzag, "make_model", slow)
    assert zigzag.model_folder(0) == final
    assert json.loads((final / "config.json").read_text()) == {"first": True}
    assert not list(final.parent.glob(".making-*"))
