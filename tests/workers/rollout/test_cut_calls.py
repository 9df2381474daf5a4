"""Answers that end in the midst of a call, at every place, read by vLLM's own parsers."""

from functools import cache

import pytest
from call_formats import MARKERS, WRITERS, Call, plain
from chat_families import byte_level_tokenizer

from rlsys.episodes.calls import CUT, UNREADABLE
from rlsys.episodes.formats import CALL_ENDS, TOOL_FORMATS, Brackets
from rlsys.episodes.parsing import ReplyParser
from rlsys.models.families import FAMILIES
from workers.rollout.reply_formats import make_reply_parser

PROPERTIES = {
    "sum": {"type": "integer"},
    "to": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "more": {
        "type": "object",
        "properties": {"deep": {"type": "array", "items": {"type": "integer"}}, "note": {"type": "string"}},
    },
    "rate": {"type": "number"},
    "sure": {"type": "boolean"},
}
# All arguments are optional, so that no schema hides that one is missing. One name begins another.
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("pay", "pay_all")
]
SHORT: Call = ("pay_all", {"sum": 1234, "to": "Ann"})
NUMBERS: Call = ("pay_all", {"rate": 1.25, "sure": True, "sum": 12})
NESTED: Call = ("pay_all", {"more": {"deep": [1, 23], "note": "a b"}, "tags": ["x", "yz"], "to": "Zoe"})
QUOTES: Call = ("pay", {"to": 'say "hi", it\'s {1} [2] \\ é', "sum": 7})
CASES = {"short": [SHORT], "numbers": [NUMBERS], "nested": [NESTED], "quotes": [QUOTES], "two": [SHORT, NESTED]}
# vLLM's parsers cannot read these, even if they are whole.
UNREAD = {("phi4_mini_json", "nested"), ("phi4_mini_json", "quotes"), ("phi4_mini_json", "two")}
UNREAD |= {("deepseek_v32", case) for case in CASES} | {(name, "two") for name in ("internlm", "gigachat3")}
# Their parsers read one call, or no text next to it.
ONE_CALL = {"internlm", "gigachat3", "deepseek_v32"}
CALLS_ALONE = {"pythonic", "llama4_pythonic", "llama3_json", "llama4_json", "llama3_json.tag", "xlam"}
TEXTS = (
    *("It's [ open", 'He said "no', "a { b 'c", "[x] {y} (z) ", "f(x) (", "```python\nd = {'a': [1]}\n```\n", "It's "),
    *("[ARGS", "\\\\", 'say \\" and [', "{{", "]]}", "1) [one\n2) {two\n"),
)
SUGGESTED = {name for _, name in TOOL_FORMATS} | {family.tool_parser for family in FAMILIES.values()} - {""}


@cache
def parser(name: str, reasoning: str = "") -> ReplyParser:
    tokenizer = byte_level_tokenizer(None, specials=("</s>",))
    tokenizer.add_tokens([*MARKERS, *(["[ARGS]"] if name == "mistral.v7" else [])])
    return make_reply_parser(tokenizer, name.partition(".")[0], reasoning, TOOLS)


def read(name: str, text: str, finish: str, reasoning: str = "") -> list[tuple[str, dict, str]]:
    reader = parser(name, reasoning)
    calls = reader.parse(reader.tokenizer(text, add_special_tokens=False)["input_ids"], finish).calls
    return [(call.name, call.arguments, call.error) for call in calls]


def without_errors(calls: list[tuple[str, dict, str]]) -> list[tuple[str, dict, str]]:
    return [call for call in calls if not call[2]]


def test_every_parser_that_is_suggested_is_cut_here():
    assert SUGGESTED - set(WRITERS) == {"openai"}, "it needs gpt-oss's own vocabulary"
    assert set(CALL_ENDS) >= SUGGESTED


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in WRITERS
        for case in (CASES if name in SUGGESTED else ["nested", "two"])
        if (name, case) not in {("internlm", "two"), ("gigachat3", "two")}
    ],
)
def test_no_call_is_made_of_half_a_call(name, case):
    text = WRITERS[name](CASES[case])
    whole = read(name, text, "stop")
    if (name, case) not in UNREAD:
        assert whole == [(tool, arguments, "") for tool, arguments in CASES[case]]
    for length in range(1, len(text)):
        made = without_errors(read(name, text[:length], "length"))
        assert made == whole[: len(made)], text[:length]


@pytest.mark.parametrize("case", ["short", "numbers", "nested", "quotes"])
@pytest.mark.parametrize("name", [name for name in WRITERS if name.partition(".")[0] in CALL_ENDS and name != "xlam"])
def test_a_call_that_is_cut_says_so_and_a_whole_one_is_made(name, case):
    [(_, arguments)] = CASES[case]
    text = WRITERS[name](CASES[case])
    for length in range(text.index("pay") + 10, text.rindex(plain([*arguments.values()][-1])[-4:]), 3):
        assert [error for *_, error in read(name, text[:length], "length")] == [CUT], text[:length]
    if (name, case) not in UNREAD:
        assert read(name, text, "length") == read(name, text, "stop")


@pytest.mark.parametrize("name", sorted({*WRITERS} - ONE_CALL - {"olmo3", "phi4_mini_json", "xlam"}))
def test_the_calls_before_the_one_that_is_cut_are_made(name):
    first, text = WRITERS[name]([SHORT]), WRITERS[name]([SHORT, NESTED])
    for length in range(text.index("more", len(first) - 10), text.rindex("Zoe"), 3):
        assert read(name, text[:length], "length") == [(*SHORT, ""), ("", {}, CUT)], text[:length]


@pytest.mark.parametrize("name", sorted({*WRITERS} - ONE_CALL - CALLS_ALONE))
def test_a_whole_call_is_made_though_another_one_is_cut_behind_a_text(name):
    text = WRITERS[name]([SHORT]) + "\nThen it's [the] (second) {one}.\n"
    whole = text + WRITERS[name]([NESTED])
    calls = read(name, whole, "stop")
    for length in range(len(text) + 1, len(whole) + 1):
        made = without_errors(read(name, whole[:length], "length"))
        assert made[:1] == [(*SHORT, "")], whole[:length]
        assert made == calls[: len(made)], whole[:length]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", sorted(SUGGESTED & set(WRITERS) | {"mistral.v7", "llama3_json.tag", "gigachat3"}))
def test_a_text_around_a_call_does_not_change_that_it_is_whole(name, text):
    for answer in (text + WRITERS[name]([QUOTES]), WRITERS[name]([QUOTES]) + text):
        assert without_errors(read(name, answer, "length")) == without_errors(read(name, answer, "stop")), answer


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "seed_oss", "gemma4", "granite"])
def test_text_may_be_cut_after_a_call(name):
    for after in ("\n", "\nI have", "\nI have [paid] {it}. It's <b"):
        assert read(name, WRITERS[name]([QUOTES]) + after, "length") == [(*QUOTES, "")]


@pytest.mark.parametrize("name", sorted(SUGGESTED & set(WRITERS)))
def test_text_that_ends_a_call_may_be_within_one(name):
    """What vLLM's parser makes of it may be no call, but never a different one because of a cut."""
    end = CALL_ENDS[name]
    end = f"{end.mark} {end.opening}]}} {end.close}" if isinstance(end, Brackets) else end
    text = WRITERS[name]([("pay", {"to": f"a{end}b", "sum": 12})])
    whole = read(name, text, "stop")
    for length in range(1, len(text)):
        made = without_errors(read(name, text[:length], "length"))
        assert made == whole[: len(made)], text[:length]


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml", "step3p5", "mimo", "seed_oss"])
def test_a_stop_string_between_the_marks_that_end_a_call_leaves_it_whole(name):
    for call in (SHORT, NESTED, QUOTES, ("pay", {})):
        text = WRITERS[name]([call])
        for length in range(text.index("</function>") + len("</function>"), len(text) + 1):
            assert read(name, text[:length], "stop") == [(*call, "")], text[:length]
            assert read(name, WRITERS[name]([SHORT]) + text[:length], "stop") == [(*SHORT, ""), (*call, "")]


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml", "step3p5", "mimo", "seed_oss"])
@pytest.mark.parametrize(
    "code", ["</function>", "x</function>\n", "</parameter>\n</function>", "<function=f></function>"]
)
def test_code_in_an_argument_that_ends_as_a_call_does_makes_no_other_one(name, code):
    text = WRITERS[name]([("pay", {"to": f"a{code}b", "sum": 12})])
    whole = read(name, text, "stop")
    for length in range(1, len(text)):
        for finish in ("stop", "length"):
            made = without_errors(read(name, text[:length], finish))
            assert made == whole[: len(made)], text[:length]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_that_the_reasoning_mentions_ends_none_behind_it(name):
    text = f"<think>\nI try {WRITERS[name]([('pay', {'sum': 1})])}.\n</think>\n\n{WRITERS[name]([SHORT])}"
    assert read(name, text, "length", "deepseek_r1") == [(*SHORT, "")]
    for length in range(text.index("</think>"), len(text)):
        assert without_errors(read(name, text[:length], "length", "deepseek_r1")) == [], text[:length]


@pytest.mark.parametrize(
    "name", ["seed_oss", "minimax_m2", "gemma4", "kimi_k2", "granite", "mistral.v7", "functiongemma"]
)
def test_a_stop_string_within_a_call_makes_no_call_of_its_half(name):
    text = WRITERS[name]([SHORT])
    stopped = text[: text.index("12") + 2]
    assert read(name, stopped, "stop") == [("", {}, UNREADABLE)]
    assert read(name, text + "\n\n", "stop") == [(*SHORT, "")], "the model need not end its turn by a token"


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_model_that_ends_its_turn_within_the_syntax_of_a_call_has_made_it(name):
    text = WRITERS[name]([SHORT]).removesuffix("\n</tool_call>")
    assert read(name, text + "<|im_end|>", "stop") == [(*SHORT, "")]


def test_function_gemma_has_numbers_objects_and_texts_that_look_like_numbers():
    call: Call = ("pay", {"to": "12", "sum": 3, "more": {"deep": [1, 2], "note": "a:b,{c:d}"}, "tags": ["x"]})
    text = WRITERS["functiongemma"]([call, SHORT])
    assert read("functiongemma", f"Yes. {text}", "stop") == [(*call, ""), (*SHORT, "")]
    assert parser("functiongemma").parse(parser("functiongemma").tokenizer("Yes.")["input_ids"], "stop").text == "Yes."


@pytest.mark.parametrize(
    ("written", "arguments", "error"),
    [
        ("pay{first name:1,über-weg.x:[2,{a b:3}]}", {"first name": 1, "über-weg.x": [2, {"a b": 3}]}, ""),
        ("pay{note:None,deep:[None,1]}", {"note": None, "deep": [None, 1]}, ""),
        ("pay{note:<escape>None<escape>,b:<escape>{c d:None}<escape>}", {"note": "None", "b": "{c d:None}"}, ""),
        ("pay{note:Nonesuch}", {}, "not valid JSON"),
        ("pay{note:True}", {}, "not valid JSON"),
        ("pay{note:a b}", {}, "not valid JSON"),
        ("pay{note}", {}, "not valid JSON"),
        ("pay{note:1", {}, "not valid JSON"),
        ("pay{note:<escape>a}", {}, "not valid JSON"),
        ("pay", {}, "not valid JSON"),
        ("pay now{}", {}, "There is no tool `pay now`"),
    ],
)
def test_arguments_of_function_gemma_are_read_right_or_not_at_all(written, arguments, error):
    """A call that cannot be read hides none before or behind it."""
    other = "<start_function_call>call:pay{sum:7}<end_function_call>"
    text = f"{other}<start_function_call>call:{written}<end_function_call>{other}"
    first, call, last = read("functiongemma", text, "stop")
    assert first == last == ("pay", {"sum": 7}, "")
    assert (call[1], error in call[2], bool(call[2])) == (arguments, True, bool(error))
