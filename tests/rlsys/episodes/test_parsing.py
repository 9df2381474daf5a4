"""What a reply says and calls."""

import json
import re

import pytest
from chat_families import TOOL, byte_level_tokenizer

from rlsys.episodes.ask import ToolCall
from rlsys.episodes.calls import CUT, UNREADABLE, CallReader
from rlsys.episodes.parsing import RawCall, ReplyParser, ReplyParts
from rlsys.errors import ConfigError

TOKENIZER = byte_level_tokenizer(None)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def read_brackets(text: str, _: list[int]) -> ReplyParts:
    """A format of our own: (reasoning) text [name arguments]."""
    reasoning, text = re.fullmatch(r"(?:\((.*?)\))?(.*)", text, re.DOTALL).groups()
    calls = [RawCall(*call.split(" ", 1), id="r1" if "r1" in call else "") for call in re.findall(r"\[(.*?)\]", text)]
    return ReplyParts(text.partition("[")[0], reasoning or "", calls)


def parse(text: str, finish: str = "stop", turn: int = 0, tool_parser: str = "brackets"):
    return ReplyParser(TOKENIZER, read_brackets, [TOOL], tool_parser).parse(encode(text), finish, turn)


def test_a_reply_without_a_parser_is_text():
    reply = ReplyParser(TOKENIZER).parse(encode("é <tool_call><|im_end|>"), "stop", logprobs=[0.5])
    assert (reply.text, reply.raw) == ("é <tool_call>", "é <tool_call><|im_end|>")
    assert (reply.calls, reply.logprobs, reply.tokens) == ([], [0.5], encode("é <tool_call><|im_end|>"))


def test_a_reply_has_text_reasoning_and_calls_with_an_id_of_turn_and_number():
    reply = parse('(hm)yes<|endoftext|>[add {"a": 1}][add {"a": 2}]<|im_end|>', turn=12)
    assert (reply.text, reply.reasoning) == ("yes", "hm")
    assert reply.calls == [ToolCall("add", {"a": 1}, "call01200"), ToolCall("add", {"a": 2}, "call01201")]


def test_an_id_that_the_model_wrote_is_kept():
    assert parse('[add {"a": 1, "r1": 0}]').calls[0].id == "r1"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ('add {"a": }', "The arguments of `add` are not valid JSON: Expecting value: line 1 column 7 (char 6)."),
        ("add 3", "The arguments of `add` must be a JSON object, not 3."),
        ("sub {}", "There is no tool `sub`. The tools are: `add`."),
        ("add {}", "The arguments of `add` are wrong: 'a' is a required property."),
        ('add {"a": "x"}', "The arguments of `add` are wrong: `a`: 'x' is not of type 'integer'."),
    ],
)
def test_a_call_that_cannot_be_made_says_why(call, sentence):
    assert [call.error for call in parse(f"[{call}]").calls] == [sentence]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_arguments_that_python_does_not_take_are_no_valid_json(value):
    call = CallReader([TOOL])("add", '{"a": ' + value + "}", "call00000")
    assert call.error.startswith("The arguments of `add` are not valid JSON: ")


def test_a_long_wrong_value_is_not_repeated_whole():
    [call] = parse(f"[add {json.dumps({'a': 'x' * 9999})}]").calls
    assert len(call.error) < 300


@pytest.mark.parametrize("marker", ["<tool_call>{", "<｜tool▁calls▁begin｜>", "<function=add", " to=functions.add"])
def test_a_call_that_the_parser_does_not_see_is_a_call_that_cannot_be_read(marker):
    assert parse(f"a {marker}").calls == [ToolCall("", {}, "call00000", UNREADABLE)]
    assert parse(f"a {marker}", "length").calls == [ToolCall("", {}, "call00000", CUT)]
    assert parse(f"({marker})text").calls == [], "in the reasoning it is no call"
    assert ReplyParser(TOKENIZER, read_brackets).parse(encode(marker), "stop").calls == [], "there are no tools"


@pytest.mark.parametrize(
    ("tool_parser", "text", "is_call"),
    [
        ("llama3_json", ' {"name": "add", ', True),
        ("llama3_json", '{"a": 1}', False),
        ("hermes", '{"name": "Ann"}', False),
        ("pythonic", "[ add(a=", True),
        ("hermes", "[add(a=", False),
    ],
)
def test_formats_without_a_mark_have_a_call_where_the_answer_begins_as_one(tool_parser, text, is_call):
    parser = ReplyParser(TOKENIZER, lambda text, tokens: ReplyParts(text), [TOOL], tool_parser)
    assert bool(parser.parse(encode(text), "stop").calls) == is_call


def test_the_last_call_of_a_cut_answer_is_not_made():
    text = '[add {"a": 1}]<tool_call></tool_call>[add {"a": 2}]<tool_call>'
    assert [call.error for call in parse(text, "length").calls] == ["", CUT]
    assert [call.error for call in parse(text).calls] == ["", ""]


def test_a_tool_whose_schema_is_wrong_is_refused_at_the_start():
    function = {"name": "f", "parameters": {"type": "objekt"}}
    with pytest.raises(ConfigError, match="the parameters of the tool `f` are no JSON schema: 'objekt'"):
        CallReader([{"type": "function", "function": function}])
