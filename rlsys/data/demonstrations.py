"""From a row to what it shows the model to write, in supervised training.

    a text and an answer                      the answer, and the end of the sequence
    messages and an answer                    the assistant's message, as the chat template writes it, to the end of its turn
    messages that end with the assistant's    each message of the assistant

A turn is tokenized behind the tokens that the model would have before it. Some templates change earlier turns when others
follow, and drop their reasoning: then a turn branches off from what it does not see (`rlsys.types.Observation`).
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlsys.data.render import (
    ANSWER_ROLES,
    MISSING,
    Message,
    PromptRenderer,
    RenderedPrompt,
    UnusableRow,
    find_messages,
    get_field,
)
from rlsys.data.tokens import tokenize_prompts
from rlsys.types import Demonstration, Observation


class TurnText(NamedTuple):
    """All that stands before a turn of the model, and the turn with what the template writes behind it."""

    before: str
    turn: str


def turn_texts(renderer: PromptRenderer, fields: dict[str, Any], prompt: RenderedPrompt) -> list[TurnText]:
    """Returns the turns that a row shows. `prompt` is what `renderer` has made of it."""
    rest = prompt.rest or find_answer(fields, renderer.form.answer_key)
    if prompt.messages is None:
        if not isinstance(rest, str):
            raise UnusableRow(
                "not a text", "the prompt is a text, and the answer a list of messages: both must be the same."
            )
        return [TurnText(prompt.text, rest)]
    messages = [*prompt.messages, *([{"role": "assistant", "content": rest}] if isinstance(rest, str) else rest)]
    turns = []
    for i in range(len(prompt.messages), len(messages)):
        if messages[i]["role"] in ANSWER_ROLES:
            before = renderer.render(messages[:i], fields)
            text = renderer.render(messages[: i + 1], fields, opens_answer=False)
            if not text.startswith(before):
                raise UnusableRow(
                    "changed by the template",
                    f"the template does not write an answer behind what it opens one with, {before[-40:]!r}, so the model "
                    "would learn another beginning. Give a Jinja file in data.template that does.",
                )
            turns.append(TurnText(before, text.removeprefix(before)))
    return turns


def find_answer(fields: dict[str, Any], key: str) -> str | list[Message]:
    """Returns what a row answers: a text, or messages that end with the assistant's."""
    answer = get_field(fields, key)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, list) and (messages := find_messages(answer)) and messages[-1]["role"] in ANSWER_ROLES:
        return messages
    value = "no such field" if answer is MISSING else repr(answer)[:80]
    raise UnusableRow(
        "without an answer",
        f"supervised training (algorithm.loss nll) learns the answer of a row, and `{key}` is {value}. Set data.answer_key to "
        "the field with the answer, or end the messages of the prompt with the assistant's.",
    )


def tokenize_turns(
    tokenizer: Any,
    prompts: Sequence[RenderedPrompt],
    prompt_tokens: Sequence[list[int]],
    rows: Sequence[list[TurnText]],
) -> list[Demonstration | UnusableRow]:
    """Tokenizes the turns of many rows at once, each behind its prompt."""
    contexts, whole = tokenize_each(tokenizer, prompts, rows)
    eos = tokenizer.eos_token_id
    ends = {eos, *(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)}
    made: list[Demonstration | UnusableRow] = []
    for i, turns in enumerate(rows):
        contexts[i][0], own = prompt_tokens[i], []
        for turn, context, both in zip(turns, contexts[i], whole[i], strict=True):
            tokens = both[len(context) :]
            if (
                both[: len(context)] != context
            ):  # a token reaches over the border, and the model has the first part already
                [tokens] = tokenize_prompts(tokenizer, [turn.turn], add_special_tokens=False)
            end = max((place + 1 for place, token in enumerate(tokens) if token in ends), default=0)
            if not end or tokenizer.decode(tokens[end:]).strip():
                tokens, end = [*tokens, *([] if eos is None else [eos])], len(tokens) + 1
            own.append(tokens[:end])  # less the spaces behind the token that ends a turn, where the model stops
        try:
            made.append(lay_out("".join(turn.turn for turn in turns), contexts[i], own))
        except UnusableRow as error:
            made.append(error)
    return made


def tokenize_each(
    tokenizer: Any, prompts: Sequence[RenderedPrompt], rows: Sequence[list[TurnText]]
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Returns the tokens of what stands before each turn of each row, and those of the same with the turn."""
    before: list[list[list[int]]] = [[] for _ in rows]
    whole: list[list[list[int]]] = [[] for _ in rows]
    for special in (True, False):
        chosen = [(i, turn) for i, p in enumerate(prompts) if p.add_special_tokens is special for turn in rows[i]]
        for kind, texts in ((before, [t.before for _, t in chosen]), (whole, [t.before + t.turn for _, t in chosen])):
            tokens = tokenize_prompts(tokenizer, texts, add_special_tokens=special)
            for (i, _), ids in zip(chosen, tokens, strict=True):
                kind[i].append(ids)
    return before, whole


def lay_out(text: str, contexts: list[list[int]], own: list[list[int]]) -> Demonstration:
    """Lays turns behind one another, each as the continuation of the last turn that it still sees."""
    observations, at = [], len(own[0])
    paths = [
        contexts[0],
        *(context + turn for context, turn in zip(contexts, own, strict=True)),
    ]  # the prompt, each turn
    for i in range(1, len(own)):
        context = contexts[i]
        seen = next((k for k in range(i, -1, -1) if context[: len(paths[k])] == paths[k]), None)
        if seen is None:
            raise UnusableRow(
                "changed by the template",
                "the template writes the beginning of a conversation in another way when it goes on: no turn continues another. "
                "Give a Jinja file in data.template that does not, or rows of one answer each.",
            )
        tokens = np.array(context[len(paths[seen]) :], dtype=np.int32)
        observations.append(Observation(at, tokens, None if seen == i else seen - 1))
        at += len(own[i])
    return Demonstration(text, np.array([t for turn in own for t in turn], dtype=np.int32), tuple(observations))


# --- as it is stored --------------------------------------------------------------------------------------------------


def to_stored(d: Demonstration) -> str:
    observations = [(o.at, o.tokens.tolist(), o.after) for o in d.observations]
    return json.dumps([d.text, d.tokens.tolist(), observations])


def from_stored(stored: str | None) -> Demonstration | None:
    if stored is None:
        return None
    text, tokens, observations = json.loads(stored)
    seen = tuple(Observation(at, np.array(said, dtype=np.int32), after) for at, said, after in observations)
    return Demonstration(text, np.array(tokens, dtype=np.int32), seen)


def sequence_of(d: Demonstration) -> list[int]:
    """Returns all tokens behind the prompt, in any order."""
    return np.concatenate([d.tokens, *(o.tokens for o in d.observations)]).tolist()  # type: ignore[no-any-return]
