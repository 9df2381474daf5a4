"""From a row to the text of its prompt."""

import pytest
from data_files import lines, load, refused, table

from rlsys.data.render import PromptFormat, compile_template
from rlsys.errors import ConfigError
from rlsys.tasks import zigzag

CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if m.role == 'system' %}0{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return zigzag.make_tokenizer()


@pytest.fixture(scope="module")
def chat():
    tokenizer = zigzag.make_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def jinja(tmp_path, text):
    (tmp_path / "mine.jinja").write_text(text)
    return str(tmp_path / "mine.jinja")


# --- the tokenizer's template ----------------------------------------------------------------------------------------------


def test_text_stays_as_it_is_even_where_there_is_a_template(tmp_path, chat):
    [prompt] = load(lines(tmp_path, {"prompt": "12"}), chat)
    assert (prompt.text, prompt.messages) == ("12", None)


@pytest.mark.parametrize("write", [lines, lambda folder, row: table(folder, [row])])
def test_messages_go_through_the_template_and_are_kept(tmp_path, chat, write):
    [prompt] = load(write(tmp_path, {"prompt": [user("12"), {"role": "assistant", "content": "3"}, user("4")]}), chat)
    assert (prompt.text, prompt.tokens) == ("1234>", [3, 4, 5, 6, 12])
    assert [m["content"] for m in prompt.messages] == ["12", "3", "4"]


def test_keys_that_only_other_messages_have_are_left_out(tmp_path, chat):
    rows = [{"prompt": [user("1")]}, {"prompt": [user("2") | {"name": "ann"}]}]
    first, second = load(table(tmp_path, rows), chat)
    assert first.messages == [user("1")]
    assert second.messages == [user("2") | {"name": "ann"}]


@pytest.mark.parametrize("write", [lines, lambda folder, *rows: table(folder, list(rows))])
def test_arguments_that_only_other_calls_have_are_left_out(tmp_path, chat, write):
    def tool_call_chat(name, **arguments):
        call = {"function": {"name": name, "arguments": arguments}}
        return [user("1"), {"role": "assistant", "content": "2", "tool_calls": [call]}, user("3")]

    chats = [tool_call_chat("weather", city="5"), tool_call_chat("sum", numbers=[4, None], exact={"digits": 6})]
    loaded = load(write(tmp_path, *({"prompt": messages} for messages in chats)), chat, longest=99)
    assert [prompt.messages for prompt in loaded] == chats


def test_a_text_becomes_a_user_message_where_that_is_asked_for(tmp_path, chat):
    [prompt] = load(lines(tmp_path, {"prompt": "12"}), chat, as_chat=True)
    assert (prompt.text, prompt.messages) == ("12>", [user("12")])


def test_a_system_message_goes_before_text_and_messages(tmp_path, chat):
    path = lines(tmp_path, {"prompt": "12"}, {"prompt": [user("34")]})
    one, two = load(path, chat, system="9")
    assert (one.text, one.messages) == ("0912>", [system("9"), user("12")])
    assert (two.text, two.messages) == ("0934>", [system("9"), user("34")])


def test_messages_keep_their_own_system_message_which_is_noted(tmp_path, chat):
    notes = []
    path = lines(tmp_path, {"prompt": [system("8"), user("1")]}, {"prompt": "2"})
    one, two = load(path, chat, system="9", notes=notes)
    assert (one.text, two.text) == ("081>", "092>")
    assert "1 rows keep their own system message" in notes[0]


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"prompt": [user("1")]}, {}, "the prompt is a list of chat messages, but the tokenizer has no chat template"),
        (
            {"prompt": "1"},
            {"as_chat": True},
            "data.as_chat makes chat messages of a text, but the tokenizer has no chat template",
        ),
        ({"prompt": "1"}, {"system": "9"}, "data.system makes chat messages of a text"),
    ],
)
def test_messages_without_a_chat_template_are_refused_with_a_way_out(tmp_path, tokenizer, row, form, message):
    for on_bad_row in ("error", "skip"):
        [problem] = refused(lines(tmp_path, row), tokenizer, on_bad_row=on_bad_row, **form)
        assert f"sums.jsonl:1: {message}" in problem
        assert "data.template" in problem


def test_what_the_chat_template_refuses_is_a_bad_row(tmp_path, chat):
    path = lines(tmp_path, {"prompt": [user("1")]}, {"prompt": [{"role": "tool", "content": "1"}]})
    problems = refused(path, chat)
    assert "sums.jsonl:2: the tokenizer's chat template refuses these messages: no tools here" in problems[0]
    assert [p.text for p in load(path, chat, on_bad_row="skip")] == ["1>"]


def test_a_template_is_not_given_special_tokens_twice(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = zigzag.make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.chat_template = CHAT
    text, messages = load(lines(tmp_path, {"prompt": "12>"}, {"prompt": [user("12")]}), tokenizer)
    assert (text.tokens, messages.tokens) == ([1, 3, 4, 12], [3, 4, 12])


# --- a template of one's own -----------------------------------------------------------------------------------------------


def test_a_jinja_file_takes_the_place_of_the_tokenizers_template(tmp_path, tokenizer):
    template = jinja(tmp_path, "{% for m in messages %}\n{{ m.content }}\n{% endfor %}\n>\n")
    one, two = load(lines(tmp_path, {"prompt": [user("1"), user("2")]}, {"prompt": "34"}), tokenizer, template=template)
    assert (one.text, two.text) == ("1\n2\n>", "34\n>")
    assert (one.messages, two.messages) == ([user("1"), user("2")], [user("34")])


def test_a_jinja_file_sees_prompt_system_and_row(tmp_path, tokenizer):
    template = jinja(tmp_path, "{{ system }}{{ row.level }}{{ prompt }}{% if add_generation_prompt %}>{% endif %}")
    rows = [{"prompt": "12", "level": 3}, {"prompt": [user("0"), user("45")], "level": 6}]
    one, two = load(lines(tmp_path, *rows), tokenizer, template=template, system="9")
    assert (one.text, two.text) == ("9312>", "9645>")


def test_a_jinja_file_may_refuse_a_row(tmp_path, tokenizer):
    template = jinja(tmp_path, "{% if row.level > 3 %}{{ raise_exception('too hard') }}{% endif %}{{ prompt }}")
    path = lines(tmp_path, {"prompt": "1", "level": 1}, {"prompt": "2", "level": 9}, {"prompt": "3"})
    problems = refused(path, tokenizer, template=template)
    assert "mine.jinja refuses this row: ValueError: too hard" in problems[0]
    assert "UndefinedError" in problems[1]
    assert [p.text for p in load(path, tokenizer, template=template, on_bad_row="skip")] == ["1"]


def test_a_jinja_file_cannot_reach_out_of_its_sandbox(tmp_path, tokenizer):
    template = jinja(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ prompt }}")
    problems = refused(lines(tmp_path, {"prompt": "1"}), tokenizer, template=template)
    assert "SecurityError" in problems[0]


def test_a_name_that_a_jinja_file_prints_and_nobody_knows_is_refused(tmp_path, tokenizer):
    path = lines(tmp_path, {"prompt": "1", "unit": "2"}, {"prompt": "3"})
    first, second, _ = refused(path, tokenizer, template=jinja(tmp_path, "{{ promt }}{{ prompt }}"))[:3]
    assert "sums.jsonl:1" in first
    assert "'promt' is undefined" in second
    [bad, _] = refused(path, tokenizer, template=jinja(tmp_path, "{{ row.unit }}{{ prompt }}"))
    assert "sums.jsonl:2" in bad
    assert "has no attribute 'unit'" in bad
    template = jinja(
        tmp_path, "{{ bos_token }}{% if row.nothing %}9{% endif %}{{ row.unit | default('5') }}{{ prompt }}"
    )
    assert [p.text for p in load(path, tokenizer, template=template)] == ["21", "53"]


def test_tojson_writes_json_and_no_web_page(tmp_path, tokenizer):
    template = jinja(tmp_path, "{{ row.facts | tojson }}{{ prompt }}")
    [prompt] = load(lines(tmp_path, {"prompt": "1", "facts": {"2": ">"}}), tokenizer, template=template, longest=99)
    assert prompt.text == '{"2": ">"}1'


def test_a_list_of_text_parts_is_one_text_and_other_parts_are_refused(tmp_path, chat):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    [prompt] = load(lines(tmp_path, {"prompt": [user(parts)]}), chat)
    assert (prompt.text, prompt.messages) == ("12>", [user("12")])
    image = {"type": "image", "url": "a.png", "text": ""}
    [bad, _] = refused(lines(tmp_path, {"prompt": [user([image, *parts])]}), chat)[:2]
    assert "a message has a part that is not text: `image`" in bad


def test_an_assistant_that_calls_a_tool_needs_no_content(tmp_path, chat):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    [prompt] = load(lines(tmp_path, {"prompt": [user("1"), call, user("2")]}), chat, longest=99)
    assert prompt.messages == [user("1"), call | {"content": None}, user("2")]


def test_chat_templates_of_the_hub_work_as_files(tmp_path, tokenizer):
    template = jinja(
        tmp_path,
        "{%- if tools %}x{% endif -%}{{ bos_token if bos_token }}{%- for message in messages -%}{%- if loop.index > 9 -%}"
        "{%- break -%}{%- endif -%}{{ message['content'] | trim }}{%- endfor -%}{{ eos_token }}",
    )
    [prompt] = load(lines(tmp_path, {"prompt": [user(" 1 ")]}), tokenizer, template=template)
    assert (prompt.text, prompt.tokens) == ("1<eos>", [3, 1])


def test_what_is_wrong_with_a_jinja_file_is_said_with_its_line(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.template: .*mine\.jinja:2: not a Jinja template: "):
        compile_template(PromptFormat(template=jinja(tmp_path, "a\n{% if %}")), {})
    with pytest.raises(ConfigError, match=r"gone\.jinja cannot be read: No such file"):
        compile_template(PromptFormat(template="gone.jinja"), {})
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        compile_template(PromptFormat(template=str(tmp_path / "latin.jinja")), {})


# --- options of templates ---------------------------------------------------------------------------------------------------

THINKING = (
    "{{ messages[-1].content }}{% if digits is defined %}{{ digits | join }}{% endif %}{% if not think %}>{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "text"), [({}, "1>"), ({"think": True}, "1"), ({"think": False, "digits": [2, 3]}, "123>")]
)
def test_a_template_gets_its_options(tmp_path, tokenizer, options, text):
    thinking = zigzag.make_tokenizer()
    thinking.chat_template = THINKING
    rows = lines(tmp_path, {"prompt": [user("1")]})
    [by_tokenizer] = load(rows, thinking, template_options=options)
    [by_file] = load(rows, tokenizer, template=jinja(tmp_path, THINKING), template_options=options)
    assert by_tokenizer.text == by_file.text == text
    assert by_tokenizer.tokens == by_file.tokens == tokenizer.encode(text)


def test_an_option_that_the_template_does_not_know_or_that_has_no_use_is_refused(tmp_path, tokenizer):
    thinking = zigzag.make_tokenizer()
    thinking.chat_template = THINKING
    rows = lines(tmp_path, {"prompt": [user("1")]})
    with pytest.raises(ConfigError, match=r"chat template has no name `thnk`. Did you mean `think`\?"):
        load(rows, thinking, template_options={"thnk": True})
    with pytest.raises(ConfigError, match=r"mine\.jinja has no name `tools`. Leave it out"):
        load(rows, tokenizer, template=jinja(tmp_path, THINKING), template_options={"tools": []})
    text = lines(tmp_path, {"prompt": "1"}, name="text.jsonl")
    with pytest.raises(ConfigError, match=r"text\.jsonl:1: data\.template_options is set, and the prompt is a text"):
        load(text, thinking, template_options={"think": True})
    assert load(text, thinking, template_options={"think": True}, as_chat=True)[0].text == "1"
