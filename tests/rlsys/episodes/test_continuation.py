"""What is said at the start of a run about a template that does not simply continue."""

import pytest
from chat_families import FAMILIES, TOOL, byte_level_tokenizer, family_tokenizer

from rlsys.episodes.conversation import ConversationTemplate, continuation_notes
from rlsys.errors import ConfigError

REASONING = "drops the reasoning of earlier answers"
SPACE = "strips spaces and line ends around earlier answers"
NO_TOOLS = "does not tell the model of its tools"
NO_RESULTS = "takes no tool results: the model gets them as a user message"
ONE_CALL = "refuses answers with several tool calls"
EXPECTED = {
    "qwen2_5": [],
    "qwen3": [REASONING],
    "llama3_1": [SPACE, ONE_CALL],
    "mistral_v3": ["changes text before an answer when a turn follows: 'AVAILABLE_TOOLS]", SPACE],
    "mistral_v7": [],
    "gemma3": [SPACE, NO_TOOLS, NO_RESULTS],
    "phi4": [NO_TOOLS, NO_RESULTS],
    "deepseek_r1": [r"changes text before an answer when a turn follows: '<think>\n'", REASONING, NO_TOOLS],
    "harmony": ["puts '<|channel|>final<|message|>' before earlier answers", REASONING],
    "olmo_tulu": [NO_TOOLS],
    "glm4_5": [SPACE],
    "vicuna": ["puts ' ' before earlier answers", NO_TOOLS, NO_RESULTS],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_its_notes(name):
    notes = continuation_notes(ConversationTemplate(family_tokenizer(name)), [TOOL])
    assert len(notes) == len(EXPECTED[name]), notes
    for note, expected in zip(notes, EXPECTED[name], strict=True):
        assert expected in note


def test_notes_about_tools_are_for_runs_with_tools():
    assert continuation_notes(ConversationTemplate(family_tokenizer("phi4"))) == []
    assert "changes" not in str(continuation_notes(ConversationTemplate(family_tokenizer("mistral_v3"))))


def test_an_opening_that_depends_on_an_option_is_noticed():
    template = ConversationTemplate(family_tokenizer("qwen3"), {"enable_thinking": False})
    assert r"'<think>\n\n</think>\n\n'. An episode keeps it as the model saw it." in continuation_notes(template)[0]


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + KEY + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("key", "noted"),
    [
        ("(m.thinking or '' if loop.last else '')", True),
        ("(m['reasoning'] if m['reasoning'] and loop.last else '')", True),
        ("(m.thinking or '')", False),
        ("('' if enable_thinking else '')", False),
    ],
)
def test_reasoning_in_a_field_of_its_own_is_noticed_if_it_is_dropped(key, noted):
    notes = continuation_notes(ConversationTemplate(byte_level_tokenizer(CHATML.replace("KEY", key))))
    assert any(REASONING in note for note in notes) == noted


def test_turns_of_plain_text_are_told():
    template = ConversationTemplate(byte_level_tokenizer("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"))
    [note] = continuation_notes(template)
    assert "ends an answer by plain text" in note
    [text, tools] = continuation_notes(ConversationTemplate(byte_level_tokenizer(None)), [TOOL])
    assert "no chat template" in text
    assert "not told of its tools" in tools


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('one turn only') if messages | length > 1 }}a", "refuses these messages: one turn only"),
        ("{{ messages[-1].content }}", "does not write earlier answers, so no turn can follow one"),
    ],
)
def test_a_template_that_cannot_be_continued_is_an_error(template, sentence):
    with pytest.raises(ConfigError, match=rf"{sentence}\. Give another Jinja file in data\.template"):
        continuation_notes(ConversationTemplate(byte_level_tokenizer(template)))
