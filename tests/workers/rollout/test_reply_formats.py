"""vLLM's own parsers, on replies in the formats that they read."""

from functools import cache

import pytest
from chat_families import TOOL, byte_level_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rlsys.episodes.calls import CUT, UNREADABLE
from rlsys.episodes.parsing import ReplyParser
from rlsys.errors import ConfigError
from workers.rollout.reply_formats import make_reply_parser

SPECIALS = ("<|python_tag|>", "[TOOL_CALLS]", "</s>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
WORDS += ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]'
CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>" + CALL.replace("{}", '{"a": 1}') + "<｜tool▁calls▁end｜>"


@cache
def parser(tool_parser: str, reasoning_parser: str = "") -> ReplyParser:
    tokenizer = byte_level_tokenizer(None, specials=SPECIALS)
    tokenizer.add_tokens(list(WORDS))
    return make_reply_parser(tokenizer, tool_parser, reasoning_parser, [TOOL])


def parse(text: str, tool_parser: str, reasoning_parser: str = "", finish: str = "stop"):
    reader = parser(tool_parser, reasoning_parser)
    return reader.parse(reader.tokenizer(text, add_special_tokens=False)["input_ids"], finish)


@pytest.mark.parametrize(
    ("tool_parser", "text", "said", "arguments"),
    [
        ("hermes", HERMES, "", [1]),
        ("hermes", f"Yes. {HERMES}\n{HERMES.replace('1', '2')}<|im_end|>", "Yes. ", [1, 2]),
        ("qwen3_coder", f"Yes.\n{CODER}\n{CODER.replace('1', '2')}<|im_end|>", "Yes.", [1, 2]),
        ("glm45", f"Yes.\n{GLM}\n{GLM.replace('1', '2')}", "Yes.", [1, 2]),
        ("llama3_json", LLAMA, "", [1]),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA.replace('1', '2')}", "", [1, 2]),
        ("mistral", MISTRAL, "", [1]),
        ("deepseek_v3", f"Yes.{DEEPSEEK}", "Yes.", [1]),
        ("pythonic", "[add(a=1), add(a=2)]", "", [1, 2]),
    ],
)
def test_calls_are_read_with_the_text_around_them(tool_parser, text, said, arguments):
    reply = parse(text, tool_parser)
    assert [(call.name, call.arguments, call.error) for call in reply.calls] == [
        ("add", {"a": a}, "") for a in arguments
    ]
    assert reply.text == said
    assert reply.raw == text


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "deepseek_v3"])
def test_an_answer_without_a_call_is_its_text(tool_parser):
    reply = parse("It is {3}, [é].<|im_end|>", tool_parser)
    assert (reply.text, reply.calls) == ("It is {3}, [é].", [])


@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        ("hermes", HERMES.replace("}}", "}")),
        ("hermes", f"{HERMES} <tool_call>add</tool_call>"),
        ("hermes", HERMES.replace("name", "nome")),
        ("qwen3_coder", CODER.replace("function=", "fun=")),
        ("llama3_json", LLAMA[:-1]),
        ("mistral", MISTRAL[:-2]),
        ("deepseek_v3", DEEPSEEK[:60]),
        ("pythonic", "[add(a=)]"),
    ],
)
def test_a_broken_call_is_a_call_that_cannot_be_read(tool_parser, text):
    assert [call.error for call in parse(text, tool_parser).calls] == [UNREADABLE]


@pytest.mark.parametrize(
    ("tool_parser", "text", "error"),
    [
        ("hermes", HERMES.replace("add", "sub"), "There is no tool `sub`. The tools are: `add`."),
        ("glm45", GLM.replace("add", "sub"), UNREADABLE),  # vLLM's parser drops it
        ("hermes", HERMES.replace("1", '"x"'), "The arguments of `add` are wrong: `a`: 'x' is not of type 'integer'."),
        (
            "qwen3_coder",
            CODER.replace("1", "x"),
            "The arguments of `add` are wrong: `a`: 'x' is not of type 'integer'.",
        ),
        ("hermes", HERMES.replace('{"a": 1}', "[1]"), "The arguments of `add` must be a JSON object, not [1]."),
        (
            "deepseek_v3",
            DEEPSEEK.replace("1", ""),
            "The arguments of `add` are not valid JSON: Expecting value: line 1 column 7 (char 6).",
        ),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tool_parser, text, error):
    assert [call.error for call in parse(text, tool_parser).calls] == [error]


@pytest.mark.parametrize(("tool_parser", "text"), [("hermes", HERMES), ("qwen3_coder", CODER), ("glm45", GLM)])
def test_a_call_that_is_cut_is_not_made(tool_parser, text):
    for length in range(len("<tool_call>"), len(text) - len("</tool_call>"), 4):
        assert CUT in [call.error for call in parse(text[:length], tool_parser, finish="length").calls]


@pytest.mark.parametrize("reasoning_parser", ["qwen3", "deepseek_r1"])
def test_reasoning_is_kept_apart(reasoning_parser):
    reply = parse(f"<think>\nI add?\n</think>\n\nYes. {HERMES}", "hermes", reasoning_parser)
    assert (reply.reasoning, reply.text) == ("I add?", "Yes. ")
    assert [call.arguments for call in reply.calls] == [{"a": 1}]
    reply = parse("hm</think>yes", "hermes", reasoning_parser)
    assert (reply.reasoning, reply.text) == ("hm", "yes"), "the opening of the answer may begin it"
    assert parse("hm", "", reasoning_parser, "length").reasoning == "hm"


PIECES = st.sampled_from(
    [HERMES, CODER, GLM, LLAMA, MISTRAL, DEEPSEEK, *WORDS, *SPECIALS, "[add(a=1)]", "é", "{", "\n"]
)


@pytest.mark.parametrize(
    "tool_parser", ["hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "deepseek_v3", "pythonic"]
)
@given(pieces=st.lists(PIECES, max_size=6), cut=st.integers(0, 40), finish=st.sampled_from(["stop", "length"]))
def test_whatever_a_model_writes_is_a_reply(tool_parser, pieces, cut, finish):
    text = "".join(pieces)[cut:]
    reply = parse(text, tool_parser, "qwen3", finish)
    assert reply.raw == text
    assert all(call.error or (call.name == "add" and type(call.arguments["a"]) is int) for call in reply.calls)


def test_names_and_tokenizers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"episode\.tool_parser: vLLM has no parser `hermess`\. It has .*hermes,"):
        make_reply_parser(byte_level_tokenizer(None), "hermess", tools=[TOOL])
    with pytest.raises(ConfigError, match=r"vLLM's parser deepseek_r1 cannot read this model's answers: .*think"):
        make_reply_parser(byte_level_tokenizer(None), "", "deepseek_r1")


def test_a_parser_without_the_file_that_it_needs_is_refused(monkeypatch):
    def fail():
        raise OSError("no vocabulary here")

    monkeypatch.setattr("vllm.entrypoints.openai.parser.harmony_utils.get_encoding", fail)
    with pytest.raises(ConfigError, match=r"openai and openai_gptoss cannot read .*: no vocabulary here"):
        make_reply_parser(byte_level_tokenizer(None), "openai", "openai_gptoss", [TOOL])


def test_calls_of_newer_mistral_models_have_their_arguments_behind_a_token():
    reader = make_reply_parser(byte_level_tokenizer(None, specials=(*SPECIALS, "[ARGS]")), "mistral", "", [TOOL])
    text = 'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}</s>'
    reply = reader.parse(reader.tokenizer(text, add_special_tokens=False)["input_ids"], "stop")
    assert [(call.name, call.arguments, call.error) for call in reply.calls] == [
        ("add", {"a": 1}, ""),
        ("add", {"a": 2}, ""),
    ]
    assert reply.text == "Yes."
