"""Prompts that end where the model cannot go on, and messages that a template loses."""

import pytest
from chat_families import FAMILIES, family_tokenizer
from data_files import lines, load, refused
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlsys import data
from rlsys.data import Origin, PromptFormat
from rlsys.data.tokens import tokenize_prompts
from rlsys.episodes.conversation import Conversation, ConversationTemplate, TemplateError
from rlsys.errors import ConfigError

WORDS = ["<unk>", "<s>", "</s>", "[SEP]", "1", "2", "3", "a", ">"]
USER, ANSWER, SYSTEM = (
    {"role": "user", "content": "1 2"},
    {"role": "assistant", "content": "3"},
    {"role": "system", "content": "Think  first."},
)
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def make_tokenizer(processor=None, chat_template=None, **special):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor:
        tokenizer.post_processor = processor
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    fast.chat_template = chat_template
    return fast


def template(single, pair=None):
    special = [(token, WORDS.index(token)) for token in ("<s>", "</s>", "[SEP]")]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


# --- what a tokenizer appends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "tokens", "appended"),
    [
        (None, "1 2", ""),
        (template("<s> $A"), "<s> 1 2", ""),
        (template("$A </s>"), "1 2", "</s>"),
        (template("<s> $A </s>"), "<s> 1 2", "</s>"),
        (template("<s> $A [SEP]", "<s> $A [SEP] $B [SEP]"), "<s> 1 2", "[SEP]"),
        (template("$A [SEP] </s>"), "1 2", "[SEP] </s>"),
        (template("</s> $A </s>"), "</s> 1 2", "</s>"),
        (processors.BertProcessing(("[SEP]", 3), ("<s>", 1)), "<s> 1 2", "[SEP]"),
        (processors.Sequence([processors.ByteLevel(), template("<s> $A </s>")]), "<s> 1 2", "</s>"),
    ],
)
def test_what_a_tokenizer_appends_is_no_part_of_a_prompt_and_is_noted(tmp_path, processor, tokens, appended):
    tokenizer, notes = make_tokenizer(processor), []
    short, long = load(lines(tmp_path, {"prompt": "1 2"}, {"prompt": "1 2 3 1"}), tokenizer, notes=notes)
    assert tokenizer.convert_ids_to_tokens(short.tokens) == tokens.split()
    assert tokenizer.convert_ids_to_tokens(long.tokens) == [*tokens.split(), "3", "1"]
    assert (f"the tokenizer appends {appended} to texts" in str(notes)) == bool(appended)


def test_an_end_that_the_user_wrote_stays_and_is_noted(tmp_path):
    tokenizer, notes = make_tokenizer(template("<s> $A </s>")), []
    [prompt] = load(lines(tmp_path, {"prompt": "1 </s>"}), tokenizer, notes=notes)
    assert tokenizer.convert_ids_to_tokens(prompt.tokens) == ["<s>", "1", "</s>"]
    assert "prompts end with </s>, which ends a sequence" in str(notes)


def test_a_saved_tokenizer_with_add_eos_token_ends_no_prompt(tmp_path):
    from transformers import LlamaTokenizer

    vocab = {word: i for i, word in enumerate([*WORDS, "▁1", "▁2"])}
    LlamaTokenizer(vocab=vocab, merges=[], add_bos_token=True, add_eos_token=True).save_pretrained(tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    [prompt] = load(lines(tmp_path, {"prompt": "1"}), tokenizer)
    assert prompt.tokens == tokenizer("1")["input_ids"][:-1]


def test_a_text_of_no_tokens_is_none_although_the_tokenizer_appends_some():
    assert tokenize_prompts(make_tokenizer(template("$A </s>")), ["", "1"], add_special_tokens=True) == [[], [4]]


def test_an_episode_without_a_template_begins_without_what_the_tokenizer_appends():
    conversation = Conversation(ConversationTemplate(make_tokenizer(template("<s> $A </s>"))))
    assert conversation.open("1 2") == [1, 4, 5]


# --- messages that end with the assistant's ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["assistant", "model"])
@pytest.mark.parametrize("by_file", [False, True])
def test_an_answer_within_the_prompt_is_refused_with_both_ways_out(tmp_path, role, by_file):
    form = {}
    if by_file:
        (tmp_path / "mine.jinja").write_text(CHAT)
        form = {"template": str(tmp_path / "mine.jinja")}
    tokenizer = make_tokenizer(chat_template=CHAT)
    path = lines(tmp_path, {"messages": [USER, ANSWER | {"role": role}], "answer": "3"}, {"messages": [USER]})
    problems = refused(path, tokenizer, prompt_key="messages", **form)
    assert "remove it from `messages`, and put what rewards compare with into `answer`" in problems[0]
    assert "set data.continue_final_message to true" in problems[0]
    with pytest.raises(ConfigError, match="the messages end with the assistant's, '3'"):
        data.peek(Origin(path), PromptFormat(prompt_key="messages", **form))
    [kept] = load(path, tokenizer, prompt_key="messages", on_bad_row="skip", longest=99, **form)
    assert kept.text == "[user]1 2[assistant]"


@pytest.mark.parametrize("content", ["<think>", "3 ", "", "<think>\n1 + 2 is 3\n</think>\n\nSo it is"])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_final_message_is_continued_where_that_is_asked_for(tmp_path, content, by_file):
    (tmp_path / "mine.jinja").write_text(CHAT)
    form = {"template": str(tmp_path / "mine.jinja")} if by_file else {}
    tokenizer = make_tokenizer(chat_template=CHAT)
    path = lines(tmp_path, {"prompt": [USER, ANSWER | {"content": content}]}, {"prompt": [USER]})
    begun, other = load(path, tokenizer, continue_final_message=True, longest=99, **form)
    assert begun.text == f"[user]1 2[assistant]{content}"
    assert begun.messages[-1]["content"] == content
    assert other.text == "[user]1 2[assistant]"


@pytest.mark.parametrize("name", FAMILIES)
def test_families_continue_a_message_as_transformers_does(tmp_path, name):
    tokenizer, messages = family_tokenizer(name), [USER, ANSWER | {"content": "So it is"}]
    [prompt] = load(lines(tmp_path, {"prompt": messages}), tokenizer, continue_final_message=True, longest=999)
    assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert prompt.tokens == tokenizer.encode(prompt.text, add_special_tokens=False)


def test_a_final_message_that_the_template_changes_or_that_calls_tools_is_refused(tmp_path):
    cut = CHAT.replace("m.content", "m.content.split('</think>')[-1]")
    path = lines(tmp_path, {"prompt": [USER, ANSWER | {"content": "<think>1</think>3"}]})
    problems = refused(path, make_tokenizer(chat_template=cut), continue_final_message=True)
    assert "the template does not print the final message as it is" in problems[0]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    path = lines(tmp_path, {"prompt": [USER, call]})
    problem = refused(path, make_tokenizer(chat_template=CHAT), continue_final_message=True)[0]
    assert "calls of tools, which cannot be continued" in problem


def test_an_episode_is_not_asked_behind_the_assistants_message():
    conversation = Conversation(ConversationTemplate(make_tokenizer(chat_template=CHAT)))
    with pytest.raises(TemplateError, match="the last message is the assistant's"):
        conversation.open([USER, ANSWER])


# --- system messages that are lost ---------------------------------------------------------------------------------------

DROPS = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
MERGES = "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}\n{% endif %}" + DROPS
RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
QUOTES = "{{ messages[0].content | tojson }}" + DROPS


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (CHAT, ""),
        (CHAT.replace("m.content", "m.content | trim"), ""),
        (MERGES, ""),
        (QUOTES, ""),
        (DROPS, "data.system is 'Think \\\\n  first.', and .* does not print it"),
        (DROPS.replace("[assistant]", "{{ messages[0].content[:5] }}"), "does not print it"),
        (RAISES, "refuses these messages: no system role. If it takes no system message, leave data.system out"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_system_message_that_no_prompt_shows_is_refused(tmp_path, chat_template, message, chat):
    path = lines(tmp_path, {"prompt": [USER] if chat else "1 2"})
    tokenizer = make_tokenizer(chat_template=chat_template)
    if message:
        with pytest.raises(ConfigError, match=message):
            load(path, tokenizer, system="Think \n  first.", longest=99)
    else:
        [prompt] = load(path, tokenizer, system="Think \n  first.", longest=99)
        assert "Think" in prompt.text


def test_a_rows_own_system_message_is_not_lost_either_but_by_a_file_of_the_users(tmp_path):
    path = lines(tmp_path, {"prompt": [SYSTEM, USER]}, {"prompt": [USER]})
    [bad, _] = refused(path, make_tokenizer(chat_template=DROPS), longest=99)
    assert "does not print the system message 'Think  first.'" in bad
    (tmp_path / "mine.jinja").write_text("{{ prompt }} >")
    assert len(load(path, make_tokenizer(), template=str(tmp_path / "mine.jinja"), longest=99)) == 2
    with pytest.raises(ConfigError, match=r"data\.system is '3', and .*mine\.jinja does not print it"):
        load(path, make_tokenizer(), template=str(tmp_path / "mine.jinja"), system="3", longest=99)


# --- templates that do not open the answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat_template", "note"),
    [
        (CHAT, ""),
        (CHAT.partition("{% if")[0], "has to write '[assistant]' itself"),
        ("{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</s>\n{% endfor %}", "write '<assistant>' itself"),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "prompts end with </s>, which ends a sequence"),
        ("{% for m in messages if m.role == 'user' %}[user]{{ m.content }}{% endfor %}", "the opening of its turn itself"),
        ("{% for m in messages if m.role == 'user' %}[user]{{ m.content }}{% endfor %}[assistant]", ""),
        ("{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}", ""),
        (CHAT.replace("[assistant]", "[assistant]<think>"), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_file", [False, True])
def test_a_template_that_does_not_open_the_answer_is_noted(tmp_path, chat_template, note, by_file):
    (tmp_path / "mine.jinja").write_text(chat_template)
    form = {"template": str(tmp_path / "mine.jinja")} if by_file else {"as_chat": True}
    notes = []
    load(
        lines(tmp_path, {"prompt": "1 2"}), make_tokenizer(chat_template=chat_template), notes=notes, longest=99, **form
    )
    assert note in str(notes).replace('"', "")
    assert len(notes) == 1 + bool(note)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_open_their_answers_and_lose_no_system_message(tmp_path, name):
    notes = []
    load(lines(tmp_path, {"prompt": [USER]}), family_tokenizer(name), notes=notes, longest=9999)
    assert len(notes) == 1, notes
