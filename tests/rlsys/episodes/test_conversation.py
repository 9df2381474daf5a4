"""What stands between two answers of a model, over the chat formats of model families."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_families import FAMILIES, TOOL, Family, Turn, byte_level_tokenizer, call_id, family_tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlsys.episodes.ask import Reply, ToolCall
from rlsys.episodes.conversation import Conversation, ConversationTemplate, TemplateError
from rlsys.episodes.template import MARK

TEXT = st.text(alphabet='abé 1\n{"😀', min_size=1, max_size=8).filter(lambda text: text.strip() != "")


@dataclass(frozen=True)
class Exchange:
    """A turn of the model, and what follows it: results for its calls, or a text."""

    turn: Turn
    cut: bool  # it ends for its length
    next: str


@st.composite
def exchanges(draw, family: Family) -> Exchange:
    calls = draw(st.lists(st.integers(0, 12), max_size=2 if "parallel" in family.shown else 1))
    if "calls" not in family.shown:
        calls = []
    text = draw(TEXT) if not calls or ("together" in family.shown and draw(st.booleans())) else ""
    reasoning = draw(st.just("") | TEXT) if text or "reasoning" in family.changes else ""
    return Exchange(Turn(text, reasoning, calls), draw(st.booleans()), draw(TEXT))


def next_messages(exchange: Exchange, turn: int) -> list[dict]:
    calls = exchange.turn.arguments
    if not calls:
        return [{"role": "user", "content": exchange.next}]
    return [
        {"role": "tool", "name": "add", "tool_call_id": call_id(turn, n), "content": exchange.next}
        for n, _ in enumerate(calls)
    ]


def answer_message(family: Family, exchange: Exchange, turn: int) -> dict:
    meant = exchange.turn
    message = {"role": "assistant", "content": meant.text}
    if meant.reasoning and "reasoning" in family.changes:
        message["reasoning_content"] = meant.reasoning
    elif meant.reasoning:
        message["content"] = f"<think>\n{meant.reasoning}\n</think>\n\n{meant.text}"
    if meant.arguments:
        message["tool_calls"] = [
            {"id": call_id(turn, n), "type": "function", "function": {"name": "add", "arguments": {"a": a}}}
            for n, a in enumerate(meant.arguments)
        ]
    return family.answer(message)


@dataclass
class Played:
    """A conversation as our code continues it, and as the template renders it."""

    tokens: list[int]  # all, end to end
    between: list[int]  # the last continuation
    last_own: str
    last_end: str  # as the template writes it before another turn
    rendered: str


def play(name: str, question: str, parts: list[Exchange], *, bytewise: bool = False, tools=(TOOL,)) -> Played:
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    conversation = Conversation(ConversationTemplate(tokenizer), tools)
    tokens, messages = conversation.open(question), [{"role": "user", "content": question}]
    for number, exchange in enumerate(parts):
        new = next_messages(exchange, number)
        own_text = family.write(exchange.turn, call_id(number, 0))
        own = tokenizer(own_text, add_special_tokens=False)["input_ids"]
        if bytewise:
            own = tokenize_bytewise(tokenizer, own_text)
        end = family.end(bool(exchange.turn.arguments), new[0]["role"])
        if not exchange.cut:
            own = [*own, tokenizer.convert_tokens_to_ids(end)]
        calls = [ToolCall("add", {"a": a}, call_id(number, n)) for n, a in enumerate(exchange.turn.arguments)]
        message = answer_message(family, exchange, number)
        reply = Reply(message["content"] or "", "length" if exchange.cut else "stop", own, calls=calls)
        conversation.add_reply(own, reply)
        between = conversation.continue_with(new)
        tokens, messages = [*tokens, *own, *between], [*messages, message, *new]
    rendered = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return Played(tokens, between, own_text, end if exchange.turn.arguments else family.earlier_end or end, rendered)


def tokenize_bytewise(tokenizer, text: str) -> list[int]:
    """A tokenization that no tokenizer would choose: special tokens, and single bytes between."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    single = tokenizer.convert_tokens_to_ids
    pieces = [
        [i] if i in tokenizer.added_tokens_decoder else map(single, tokenizer.convert_ids_to_tokens(i)) for i in ids
    ]
    return [i for piece in pieces for i in piece]


def is_changed(name: str, parts: list[Exchange]) -> bool:
    """True if the template writes the conversation otherwise than it went on turn by turn."""
    changes, turns = FAMILIES[name].changes, [part.turn for part in parts]
    return (
        ("tools" in changes and any(not turn.arguments for turn in turns))
        or ("reasoning" in changes and any(turn.reasoning for turn in turns))
        or ("space" in changes and any(turn.text.strip() != turn.text for turn in turns))
    )


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "opening" not in family.changes])
@given(data=st.data(), question=TEXT, bytewise=st.booleans())
def test_a_conversation_in_pieces_reads_as_the_template_writes_it_whole(name, data, question, bytewise):
    parts = data.draw(st.lists(exchanges(FAMILIES[name]), min_size=1, max_size=4))
    assume(not is_changed(name, parts))
    played = play(name, question, parts, bytewise=bytewise)
    text = family_tokenizer(name).decode(played.tokens)
    if FAMILIES[name].earlier_end:  # the model ends its turn by another token than earlier turns have
        text = text.replace(FAMILIES[name].eos, FAMILIES[name].earlier_end)
    assert text == played.rendered


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data(), question=TEXT)
def test_whatever_the_template_changes_earlier_the_last_answer_is_followed_by_its_text(name, data, question):
    parts = data.draw(st.lists(exchanges(FAMILIES[name]), min_size=1, max_size=4))
    played = play(name, question, parts)
    between = family_tokenizer(name).decode(played.between)
    assert played.rendered.endswith(between)
    before, last = played.rendered.removesuffix(between), parts[-1]
    if not last.cut:
        assert before.endswith(played.last_end)
    before = before.removesuffix("" if last.cut else played.last_end).rstrip()
    assert before.endswith(last.turn.text.strip() if not last.turn.arguments else played.last_own[-5:])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"deepseek_r1", "harmony"}))  # they change every text
@given(data=st.data())
def test_pieces_have_the_tokens_of_the_whole_where_special_tokens_stand_between(name, data):
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    parts = data.draw(st.lists(exchanges(family), min_size=1, max_size=3))
    assume(not is_changed(name, parts))
    assume(all((part.turn.text or "a")[0].isalnum() for part in parts))  # or it merges with the opening before it
    played = play(name, "a", parts)
    assert played.tokens == tokenizer(played.rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("scheme", ["first", "always"])
@given(question=TEXT, answers=st.lists(TEXT, min_size=1, max_size=3))
def test_a_tokenizer_that_puts_spaces_before_words_puts_none_more_between(scheme, question, answers):
    tokenizer = metaspace_tokenizer(scheme)
    conversation = Conversation(ConversationTemplate(tokenizer))
    tokens, messages = conversation.open(question), [{"role": "user", "content": question}]
    for answer in answers:
        own = tokenizer.convert_tokens_to_ids(["▁", "a"] if scheme == "always" else ["a"])
        conversation.add_reply(own, Reply("a", "length"))
        tokens = [*tokens, *own, *conversation.continue_with(answer)]
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": answer}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokens == tokenizer(whole, add_special_tokens=False)["input_ids"]


def metaspace_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    letters = ["<unk>", "</s>", "[A]", "[/A]", "▁", *'abé1\n{"😀']
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"extra_special_tokens": ["[A]", "[/A]"]})
    fast.chat_template = (
        "{%- for m in messages %}"
        "{{- '[A]' + m.content + '[/A]' if m.role == 'user' else m.content + eos_token }}"
        "{%- endfor %}"
    )
    return fast


@pytest.mark.parametrize("file", ["template_chatml.jinja", "template_minicpmv45.jinja"])
@given(texts=st.lists(st.tuples(TEXT, st.booleans(), TEXT), min_size=1, max_size=4))
def test_templates_that_vllm_ships_can_be_continued(file, texts):
    tokenizer = shipped_tokenizer(file)
    conversation = Conversation(ConversationTemplate(tokenizer, {"enable_thinking": None}))
    tokens, messages = conversation.open("a"), [{"role": "user", "content": "a"}]
    for answer, cut, question in texts:
        own = tokenizer(answer + ("" if cut else "<|im_end|>"), add_special_tokens=False)["input_ids"]
        conversation.add_reply(own, Reply(answer, "length" if cut else "stop"))
        tokens = [*tokens, *own, *conversation.continue_with(question)]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=None)
    assert tokenizer.decode(tokens) == whole


@cache
def shipped_tokenizer(file: str) -> PreTrainedTokenizerFast:
    [vllm] = find_spec("vllm").submodule_search_locations
    return byte_level_tokenizer((Path(vllm) / "transformers_utils/chat_templates" / file).read_text())


def test_what_ended_the_turn_is_not_written_twice_and_is_written_if_it_is_missing():
    tokenizer = family_tokenizer("gemma3")
    ask = "\n<start_of_turn>user\nb<end_of_turn>\n<start_of_turn>model\n"
    assert continued(tokenizer, "a<end_of_turn>") == ask
    assert continued(tokenizer, "a") == "<end_of_turn>" + ask
    assert continued(tokenizer, "") == "<end_of_turn>" + ask
    assert continued(tokenizer, "a<eos>") == "<end_of_turn>" + ask, "not an end that the tokenizer knows"
    tokenizer = byte_level_tokenizer(tokenizer.chat_template, "<eos>", specials=("<start_of_turn>", "<end_of_turn>"))
    assert continued(tokenizer, "a<eos>") == ask, "the model ended its turn in its own way"


def continued(tokenizer, own: str) -> str:
    conversation = Conversation(ConversationTemplate(tokenizer))
    conversation.open("a")
    conversation.add_reply(tokenizer(own, add_special_tokens=False)["input_ids"], Reply(own, "stop"))
    return tokenizer.decode(conversation.continue_with("b"))


def test_several_calls_of_an_answer_have_their_results_though_the_template_takes_one_call():
    tokenizer = family_tokenizer("llama3_1")
    conversation = Conversation(ConversationTemplate(tokenizer), [TOOL])
    conversation.open("a")
    calls = [ToolCall("add", {"a": n}, call_id(0, n)) for n in range(2)]
    conversation.add_reply([1], Reply("", "length", calls=calls))
    results = [{"role": "tool", "name": "add", "tool_call_id": call.id, "content": f"r{call.id}"} for call in calls]
    assert tokenizer.decode(conversation.continue_with(results)) == (
        "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\nrcall00000<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\nrcall00001<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", ["gemma3", "phi4", "vicuna"])
def test_results_are_a_user_message_where_the_template_takes_none(name):
    tokenizer = family_tokenizer(name)
    conversation = Conversation(ConversationTemplate(tokenizer))
    conversation.open("a")
    conversation.add_reply([1], Reply("", "length", calls=[ToolCall("add", {}, "x")]))
    text = tokenizer.decode(
        conversation.continue_with([{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}])
    )
    other = Conversation(ConversationTemplate(tokenizer))
    other.open("a")
    other.add_reply([1], Reply("", "length"))
    assert text == tokenizer.decode(other.continue_with("3\n\n4"))


def test_a_result_without_a_call_keeps_the_role_where_the_template_allows_it():
    assert "<tool_response>\n3" in result_without_call("qwen2_5")
    assert "<start_of_turn>user\n3" in result_without_call("gemma3")
    assert "[INST] 3[/INST]" in result_without_call("mistral_v3"), "its roles must alternate"


def result_without_call(name: str) -> str:
    tokenizer = family_tokenizer(name)
    conversation = Conversation(ConversationTemplate(tokenizer))
    conversation.open("a")
    conversation.add_reply([1], Reply("b", "length"))
    return tokenizer.decode(conversation.continue_with([{"role": "tool", "content": "3", "tool_call_id": "call00000"}]))


def test_without_a_chat_template_texts_follow_one_another():
    tokenizer = byte_level_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    conversation = Conversation(ConversationTemplate(tokenizer))
    assert tokenizer.decode(conversation.open("ab")) == "<bos>ab"
    conversation.add_reply([1], Reply("x", "stop"))
    assert tokenizer.decode(conversation.continue_with("é\ud800")) == "é?"
    with pytest.raises(TemplateError, match=r"no chat template for a message of the role `system`.*data\.template"):
        Conversation(ConversationTemplate(tokenizer)).open([{"role": "system", "content": "a"}])


def test_the_transcript_says_why_a_call_cannot_be_read():
    conversation = Conversation(ConversationTemplate(family_tokenizer("qwen3")), [TOOL])
    conversation.open("1 + 2?")
    calls = [ToolCall("add", {}, "call00000", "`a` is missing"), ToolCall("add", {"a": 1}, "call00001")]
    conversation.add_reply([1], Reply("", "stop", calls=calls))
    broken, fine = conversation.messages[-1]["tool_calls"]
    assert broken["error"] == "`a` is missing"
    assert "error" not in fine


def test_a_tokenizer_with_a_template_for_tools_uses_it_for_tools():
    message = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_level_tokenizer({"default": "d" + message, "tool_use": "t" + message})
    assert tokenizer.decode(Conversation(ConversationTemplate(tokenizer)).open("a")) == "da"
    assert tokenizer.decode(Conversation(ConversationTemplate(tokenizer), [TOOL]).open("a")) == "ta"
    assert tokenizer.decode(Conversation(ConversationTemplate(tokenizer, {}, "x" + message), [TOOL]).open("a")) == "xa"


def test_the_transcript_says_which_turns_the_limit_cut():
    conversation = Conversation(ConversationTemplate(byte_level_tokenizer(None)))
    for finish in ("length", "stop"):
        conversation.continue_with("a") if conversation.messages else conversation.open("a")
        conversation.add_reply([1], Reply("x", finish))
    assert [message.get("finish") for message in conversation.messages] == [None, "length", None, None]


def test_the_transcript_has_what_was_asked_answered_and_called():
    conversation = Conversation(ConversationTemplate(family_tokenizer("qwen2_5")))
    conversation.open([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    call = ToolCall("add", {"a": 1}, "call00000")
    conversation.add_reply([1], Reply("x", "stop", reasoning="hm", calls=[call]))
    conversation.continue_with([{"role": "tool", "content": "2", "tool_call_id": "call00000"}])
    function = {"name": "add", "arguments": {"a": 1}}
    assert conversation.messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call00000"},
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (3, "ask takes a text or a list of messages, not int 3"),
        ([], "ask takes a text or a list of messages, not list"),
        (["a"], 'a message is a dict such as {"role": "user"'),
        ([{"role": "user"}], "the content of a message is a text, not NoneType None"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "a part of a message is a text, not dict {'type': 'image'}",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}],
            "tool_calls of a message are as OpenAI's API has them, not list [{'name': 'add'}]",
        ),
    ],
)
def test_what_is_no_message_is_refused_in_a_sentence(content, sentence):
    with pytest.raises(TypeError, match=re.escape(sentence)):
        Conversation(ConversationTemplate(family_tokenizer("qwen2_5"))).open(content)


def test_a_message_that_the_template_would_drop_is_refused():
    conversation = Conversation(ConversationTemplate(family_tokenizer("phi4")))
    conversation.open("a")
    conversation.add_reply([1], Reply("", "stop"))
    with pytest.raises(TemplateError, match="drops messages of the role `developer`"):
        conversation.continue_with([{"role": "developer", "content": "b"}])


def test_a_text_that_looks_like_the_mark_of_an_answer_changes_nothing():
    tokenizer = family_tokenizer("qwen2_5")
    conversation = Conversation(ConversationTemplate(tokenizer))
    conversation.open(MARK)
    conversation.add_reply([1], Reply("", "length"))
    expected = f"<|im_end|>\n<|im_start|>user\n{MARK}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(conversation.continue_with(MARK)) == expected


def test_the_end_of_a_call_that_the_model_has_written_is_not_written_again():
    template = (
        "{%- for m in messages %}"
        "{%- if m.tool_calls %}{{- '<A><C>' + (m.tool_calls[-1].function.arguments | tojson) + '</C>' }}"
        "{%- else %}{{- '<' + m.role + '>' + m.content + ('</s>' if m.role == 'assistant' else '') }}{%- endif %}"
        "{%- endfor %}"
    )
    tokenizer = byte_level_tokenizer(template, "</s>", specials=("<C>", "</C>", "<tool>"))

    def after(own: str) -> str:
        conversation = Conversation(ConversationTemplate(tokenizer))
        conversation.open("a")
        own_tokens = tokenizer(own, add_special_tokens=False)["input_ids"]
        conversation.add_reply(own_tokens, Reply("", "stop", calls=[ToolCall("add", {}, "x")]))
        return tokenizer.decode(conversation.continue_with([{"role": "tool", "content": "3"}]))

    assert after('<C>{"a": 1}') == "</C><tool>3"
    assert after('<C>{"a": 1}</C>') == "<tool>3"
    assert after('<C>{"a": 1}</C></s>') == "<tool>3"


@pytest.mark.parametrize(("name", "role"), [("vicuna", "system"), ("phi4", "developer")])
def test_a_first_message_that_the_template_drops_is_refused(name, role):
    tokenizer = family_tokenizer(name)
    messages = [{"role": role, "content": "Answer in French."}, {"role": "user", "content": "What is it?"}]
    assert "French" not in tokenizer.apply_chat_template(messages, tokenize=False), "nobody would tell"
    conversation = Conversation(ConversationTemplate(tokenizer))
    with pytest.raises(TemplateError, match=f"drops messages of the role `{role}`: use the role `user`"):
        conversation.open(messages)
    assert "What is it?" in tokenizer.decode(conversation.open(messages[1:]))
