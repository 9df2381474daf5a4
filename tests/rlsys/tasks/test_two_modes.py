"""The built-in task with two modes: digit sums, answered at once or step by step."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.rewards.text import exact
from rlsys.tasks import two_modes


@pytest.mark.parametrize(
    ("digits", "sums"), [("000000", "000000"), ("000047", "000041"), ("938271", "920290"), ("111111", "123456")]
)
def test_running_sums_keep_the_last_digit(digits, sums):
    assert two_modes.running_sums(digits) == sums


@pytest.mark.parametrize(("mode", "text"), [("<short>", "<short>0"), ("<think>", "<think>92029</think>0")])
def test_both_modes_end_in_the_answer(mode, text):
    assert "".join(two_modes.answer("938271", mode)) == text
    assert exact(text, "0", after=">") == 1
    assert exact(text, "9", after=">") == 0


def test_no_prompt_is_both_learned_and_held_out_and_rows_are_always_the_same():
    train, held_out = (two_modes.rows(name) for name in ("two_modes", "two_modes_heldout"))
    assert (len(train), len(held_out)) == (two_modes.TRAIN_PROMPTS, two_modes.HELD_OUT_PROMPTS)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert train == two_modes.rows("two_modes")
    assert all(int(row["answer"]) == sum(map(int, row["prompt"][:6])) % 10 for row in train)


def test_half_of_the_prompts_have_at_most_two_digits_to_add():
    sizes = [6 - row["prompt"].count("0") for row in two_modes.rows("two_modes")]
    assert set(sizes) == {1, 2, 5, 6}
    assert sum(size <= 2 for size in sizes) / len(sizes) == pytest.approx(0.5, abs=0.03)


def test_a_control_token_is_one_token_that_rewards_see():
    tokenizer = two_modes.make_tokenizer()
    ids = tokenizer.encode("040700><think>04411</think>1")
    assert ids == [2, 6, 2, 9, 2, 2, 12, 14, 2, 6, 6, 3, 3, 15, 3]
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == "040700><think>04411</think>1"


def test_the_warm_start_teaches_both_modes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(two_modes, "make_model", functools.partial(two_modes.make_model, steps=40))
    folder = two_modes.model_folder(3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(two_modes.SYMBOLS)
    chances = model(torch.tensor([tokenizer.encode("040700>")])).logits[0, -1].softmax(0)
    assert chances[tokenizer.encode("<short>") + tokenizer.encode("<think>")].tolist() == pytest.approx(
        [0.5, 0.5], abs=0.2
    )
