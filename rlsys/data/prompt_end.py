"""Finds prompts after which the model cannot go on as it was trained: behind the end of a sequence, or before its own turn is opened."""

from typing import Any

from rlsys.data.render import ANSWER_ROLES, MARK, PromptRenderer, RenderedPrompt, UnusableRow
from rlsys.data.tokens import appended_tokens


def describe_end(
    path: str, renderer: PromptRenderer, fields: dict[str, Any], prompt: RenderedPrompt, tokens: list[int]
) -> list[str]:
    """Returns sentences about the end of a data set's prompts. `prompt` is its first usable one, made of `fields`."""
    tokenizer, notes = renderer.tokenizer, []
    if prompt.add_special_tokens and (appended := appended_tokens(tokenizer, prompt.text)):
        names = " ".join(tokenizer.convert_ids_to_tokens(appended))
        notes.append(
            f"{path}: the tokenizer appends {names} to texts; prompts go without, as the model goes on behind them"
        )
    if prompt.messages and (missing := missing_opening(renderer, prompt, fields)):
        notes.append(
            f"{path}: the template does not open the answer: prompts end with {prompt.text[-30:]!r}, and the model has to "
            f"write {missing} itself. Give a Jinja file in data.template that opens it."
        )
    elif tokens and tokens[-1] == tokenizer.eos_token_id:
        way_out = "Remove it" if prompt.messages is None else "Give a Jinja file in data.template that leaves it out"
        notes.append(
            f"{path}: prompts end with {tokenizer.eos_token}, which ends a sequence: the model is asked to go on after its "
            f"end. {way_out}."
        )
    return notes


def missing_opening(renderer: PromptRenderer, prompt: RenderedPrompt, fields: dict[str, Any]) -> str:
    """Returns what the template writes between a prompt and an answer; empty if the prompt ends with it."""
    messages = prompt.messages
    assert messages
    if messages[-1]["role"] in ANSWER_ROLES:  # to be continued
        return ""
    answer = {"role": "assistant", "content": MARK}
    try:
        closed = renderer.render(messages, fields, opens_answer=False)
        before, shown, _ = renderer.render([*messages, answer], fields, opens_answer=False).partition(MARK)
    except UnusableRow:  # it takes no answers, and nothing to compare with
        return ""
    text = prompt.text.rstrip()
    if closed.rstrip() != text:
        return ""
    if shown:
        return repr(between) if before.startswith(text) and (between := before.removeprefix(text).strip()) else ""
    return "the opening of its turn" if text.endswith((messages[-1]["content"] or MARK).strip()) else ""
