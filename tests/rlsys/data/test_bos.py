"""Prompts without the BOS token that a model was trained with."""

import pytest
from data_files import lines
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlsys.data import Origin, PromptFormat
from rlsys.data.bos import check_first_prompt

WITH, WITHOUT = "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"
CHAT, TEXT = [{"role": "user", "content": "1"}], "1"


def make_tokenizer(*, adds_bos: bool, chat_template: str | None = None, bos: str | None = "<bos>"):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1, "1": 2, "a": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "template", "warning"),
    [
        (make_tokenizer(adds_bos=True), TEXT, "", ""),
        (make_tokenizer(adds_bos=True, chat_template=WITH), CHAT, "", ""),
        (make_tokenizer(adds_bos=True, chat_template=WITHOUT), CHAT, "", "Its chat template leaves it out"),
        (
            make_tokenizer(adds_bos=True, chat_template=WITH),
            CHAT,
            WITHOUT,
            "Use a data.template that begins with {{ bos",
        ),
        (make_tokenizer(adds_bos=True, chat_template=WITH), TEXT, WITH, ""),
        (make_tokenizer(adds_bos=False, chat_template=WITH), TEXT, "", "Write <bos> at the beginning of each"),
        (make_tokenizer(adds_bos=False, chat_template=WITH), "<bos> 1", "", ""),
        (make_tokenizer(adds_bos=False, chat_template=WITHOUT), CHAT, "", ""),
        (make_tokenizer(adds_bos=False), TEXT, "", ""),
        (make_tokenizer(adds_bos=False, bos=None), TEXT, "", ""),
    ],
)
def test_a_missing_bos_is_noticed_where_the_tokenizer_shows_that_the_model_expects_it(
    tmp_path, tokenizer, prompt, template, warning
):
    path = lines(tmp_path, {"no_prompt": 0}, {"prompt": prompt})
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    sentence = check_first_prompt(Origin(path), PromptFormat(template=str(file) if template else ""), tokenizer)
    assert warning in sentence
    assert bool(sentence) == bool(warning)
    if warning:
        assert sentence.startswith(f"{path}: prompts do not begin with <bos>")
