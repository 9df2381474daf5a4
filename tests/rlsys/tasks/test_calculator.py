"""The task for tools: call a calculator, or guess a sum."""

import functools
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.episodes.ask import Reply, ToolCall
from rlsys.episodes.conversation import Conversation, ConversationTemplate
from rlsys.episodes.formats import suggest_tool_parser
from rlsys.episodes.tools.schema import function_schema
from rlsys.rewards.text import exact
from rlsys.tasks import calculator


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    calculator.make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return AutoTokenizer.from_pretrained(folder)


def text_of(symbols):
    return "".join(s for s in symbols if s != "<eos>")


def turns_with_call(rng):
    return next(turns for turns in calculator.transcripts(rng) if len(turns) > 2)


def test_rows_are_sums_and_none_is_both_learned_and_held_out():
    train, held_out = (calculator.rows(name) for name in ("calculator", "calculator_heldout"))
    assert (len(train), len(held_out)) == (4096, 256)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert train == calculator.rows("calculator")
    for row in train + held_out:
        a, b = map(int, row["prompt"].split("+"))
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert row["answer"] == str(a + b)


def test_the_conversation_is_in_the_form_that_the_warm_start_shows(tokenizer):
    prompt, call, result, answer = (symbols for _, symbols in turns_with_call(random.Random(0)))
    name_and_arguments = json.loads(text_of(call).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert name_and_arguments["name"] == "add"
    own = tokenizer.convert_tokens_to_ids(call)
    conversation = Conversation(ConversationTemplate(tokenizer), [function_schema(calculator.add)])
    tokens = conversation.open(text_of(prompt))
    conversation.add_reply(own, Reply("", "stop", own, calls=[ToolCall(**name_and_arguments, id="call00000")]))
    value = str(calculator.add(**name_and_arguments["arguments"]))
    tokens += own + conversation.continue_with([{"role": "tool", "tool_call_id": "call00000", "content": value}])
    assert tokens == tokenizer.convert_tokens_to_ids([*prompt, *call, *result])
    assert answer[0] == "="


def test_the_template_suggests_the_parser_of_its_format_and_a_call_is_few_tokens(tokenizer):
    assert suggest_tool_parser({"model_type": "qwen2"}, tokenizer.chat_template) == "hermes"
    text = '<tool_call>{"name": "add", "arguments": {"a": 27, "b": 58}}</tool_call>'
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == 9
    assert tokenizer.decode(tokens) == text


def test_the_reward_reads_both_forms_of_an_answer():
    call = '<tool_call>{"name": "add", "arguments": {"a": 27, "b": 58}}</tool_call>'
    assert exact("=85", "85", after="=") == 1
    assert exact(f"{call}=85", "85", after="=") == 1
    assert exact(f"{call}=86", "85", after="=") == 0
    assert exact(call, "85", after="=") == 0


def test_the_warm_start_calls_sometimes_and_copies_with_slips():
    calls, copied, digits, right = 0, 0, 0, 0
    coming = calculator.transcripts(random.Random(0))
    for _ in range(4000):
        prompt, *turns = next(coming)
        a, b = "".join(prompt[1]).split("+")
        assert not calculator.is_held_out(int(a), int(b))
        if len(turns) == 1:
            right += text_of(turns[0][1]) == f"={int(a) + int(b)}"
            continue
        calls += 1
        arguments = json.loads(text_of(turns[0][1][1:-2]))["arguments"]
        copied += sum(x == y for x, y in zip(f"{arguments['a']}{arguments['b']}", a + b, strict=True))
        digits += 4
        assert text_of(turns[1][1]) == f"<tool_response>{arguments['a'] + arguments['b']}</tool_response>"
    assert calls / 4000 == pytest.approx(0.3, abs=0.03)
    assert copied / digits == pytest.approx(0.8 + 0.2 * (1 / 9 + 1 / 10) / 2, abs=0.02)
    assert right / (4000 - calls) < 0.02, "direct answers do not add"


@pytest.mark.long
def test_the_warm_start_teaches_both_forms(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calculator, "make_model", functools.partial(calculator.make_model, steps=120))
    folder = calculator.model_folder(3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    first = model(torch.tensor([tokenizer.encode("27+58")])).logits[0, -1].softmax(-1)
    call, direct = (first[tokenizer.convert_tokens_to_ids(symbol)].item() for symbol in ("<tool_call>", "="))
    assert call + direct > 0.95
    assert 0.15 < call < 0.45
