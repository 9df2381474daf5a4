"""Finds prompts without the BOS token that a model was trained with. Some models, such as Gemma, then write nonsense."""

from typing import Any

from rlsys.data.origin import Origin, locate_data
from rlsys.data.prepare import DatasetPreparer
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import DataRow
from rlsys.data.render import PromptFormat, PromptRenderer, UnusableRow


def describe_missing_bos(path: str, form: PromptFormat, tokenizer: Any, tokens: list[int], is_chat: bool) -> str:
    """Returns a sentence if a prompt with these tokens lacks the BOS token; else an empty text."""
    bos = tokenizer.bos_token
    if tokens[:1] == [tokenizer.bos_token_id] or not expects_bos(tokenizer):
        return ""
    begin = "that begins with {{ bos_token }}"
    if form.template:
        way_out = f"Use a data.template {begin}."
    elif is_chat:
        way_out = f"Its chat template leaves it out: give a Jinja file in data.template {begin}."
    else:
        way_out = f"Write {bos} at the beginning of each, or use data.as_chat true."
    return f"{path}: prompts do not begin with {bos}, as texts of this model's tokenizer do. {way_out}"


def expects_bos(tokenizer: Any) -> bool:
    """Returns whether the tokenizer, or its chat template, puts a BOS token before a text."""
    if tokenizer.bos_token_id is None:
        return False
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] or chat_begins_with_bos(tokenizer)


def chat_begins_with_bos(tokenizer: Any) -> bool:
    if not (tokenizer.chat_template and tokenizer.bos_token):
        return False
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except Exception:  # a template may raise any error
        return False
    return str(text).startswith(tokenizer.bos_token)


def check_first_prompt(origin: Origin, form: PromptFormat, tokenizer: Any) -> str:
    """Returns the sentence of `describe_missing_bos` for the first usable row of a data set."""
    renderer = PromptRenderer(form, tokenizer)
    for row in read_rows(origin, locate_data(origin)):
        if isinstance(row, DataRow):
            try:
                prompt = renderer(row.fields)
            except UnusableRow:
                continue
            [tokens] = DatasetPreparer(tokenizer, lambda _: None).tokenize([prompt])
            return describe_missing_bos(origin.path, form, tokenizer, tokens, prompt.messages is not None)
    return ""
