"""A model that goes on after its answer is named at the start."""

import pytest
from chat_families import FAMILIES, TEMPLATES, byte_level_tokenizer, family_tokenizer

from rlsys.episodes.conversation import ConversationTemplate, continuation_notes
from rlsys.episodes.turn_end import describe_turn_end

ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "phi4": "<|im_end|>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_ends_as_its_template_does_has_no_note(name):
    tokenizer = family_tokenizer(name)
    assert describe_turn_end(ConversationTemplate(tokenizer), [tokenizer.eos_token_id]) == ""


@pytest.mark.parametrize("name", ENDS)
def test_a_base_model_that_ends_elsewhere_is_told_of_the_token(name):
    template = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
    family = FAMILIES[name]
    tokenizer = byte_level_tokenizer(template, "<|the_end|>", family.bos, (*family.specials, ENDS[name]))
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    conversation = ConversationTemplate(tokenizer)
    note = describe_turn_end(conversation, [tokenizer.eos_token_id])
    assert note.startswith(f"The chat template ends an answer by {ENDS[name]}, and completions end at <|the_end|>. ")
    assert note.endswith(f"Give rollout.stop_token_ids: [{end}].")
    assert note in continuation_notes(conversation)
    assert describe_turn_end(conversation, [tokenizer.eos_token_id, end]) == ""


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_without_a_special_end_of_turn_has_no_note(template):
    tokenizer = byte_level_tokenizer(template, "<|endoftext|>")
    assert describe_turn_end(ConversationTemplate(tokenizer), [tokenizer.eos_token_id]) == ""
