"""Says at the start of a run what a chat template does to earlier turns, which an episode keeps as they were sampled."""

import re
from collections.abc import Collection

from rlsys.episodes.ask import Message
from rlsys.episodes.template import (
    MARK,
    PROBE,
    PROBE_CALL,
    PROBE_RESULT,
    QUESTION,
    ConversationTemplate,
    TemplateError,
    Tools,
    call_forms,
)
from rlsys.episodes.turn_end import describe_turn_end
from rlsys.errors import ConfigError

KEEPS = "An episode keeps them as they were sampled."
PROBE_TOOL = {"name": PROBE, "description": "a", "parameters": {"type": "object", "properties": {}}}
ANSWER: Message = {"role": "assistant", "content": MARK}


def continuation_notes(
    template: ConversationTemplate, tools: Tools = (), end_ids: Collection[int] | None = None
) -> list[str]:
    """Returns a sentence for each difference between the template and an episode.

    `end_ids`: the tokens at which completions end, by default the tokenizer's.

    Raises `ConfigError` if no turn can follow an answer.
    """
    if not template.chat_template:
        return plain_text_notes(tools)
    notes = [describe_opening(template, tools), describe_reasoning(template), describe_space(template)]
    ends = [template.tokenizer.eos_token_id] if end_ids is None else end_ids
    notes += [describe_boundary(template), describe_turn_end(template, ends)]
    if tools:
        notes += [describe_tools(template), describe_results(template), describe_parallel_calls(template)]
    return [note for note in notes if note]


def plain_text_notes(tools: Tools) -> list[str]:
    notes = ["The tokenizer has no chat template: the texts of an episode follow one another with nothing between."]
    if tools:
        notes.append("The model is not told of its tools: describe them in the prompts. Results are plain text.")
    return notes


def describe_opening(template: ConversationTemplate, tools: Tools) -> str:
    """Compares the text before an answer with what the template writes there when a turn follows."""
    try:
        opening = template.render([QUESTION], tools)
        continued = template.render([QUESTION, ANSWER, QUESTION], tools)
        template.continuation([QUESTION], ANSWER, [QUESTION], tools)
    except TemplateError as error:
        raise ConfigError(
            f"Episodes need a chat template that can continue after an answer. {error}. "
            "Give another Jinja file in data.template."
        ) from None
    if continued.startswith(opening + MARK):
        return ""
    if continued.startswith(opening):
        added = continued.removeprefix(opening).partition(MARK)[0]
        return (
            f"The chat template puts {shorten(added)} before earlier answers. In an episode only the model writes it."
        )
    kept = next(n for n in range(len(opening)) if opening[n : n + 1] != continued[n : n + 1])
    return (
        f"The chat template changes text before an answer when a turn follows: {shorten(opening[kept:])}. "
        "An episode keeps it as the model saw it."
    )


def describe_reasoning(template: ConversationTemplate) -> str:
    forms: list[Message] = [{"content": f"<think>\n{PROBE}\n</think>\n\n{MARK}"}]
    forms += [
        {"content": MARK, key: PROBE}
        for key in ("reasoning_content", "reasoning", "thinking")
        if re.search(rf"""(\.|\[["']|get\(["']){key}\b""", template.chat_template)
    ]
    if all(keeps(template, form, PROBE) for form in forms):
        return ""
    return f"The chat template drops the reasoning of earlier answers. {KEEPS}"


def describe_space(template: ConversationTemplate) -> str:
    text = f" \n{MARK}\n "
    if keeps(template, {"content": text}, text):
        return ""
    return f"The chat template strips spaces and line ends around earlier answers. {KEEPS}"


def keeps(template: ConversationTemplate, answer: Message, text: str) -> bool:
    try:
        return text in template.render([QUESTION, {"role": "assistant"} | answer, QUESTION])
    except TemplateError:
        return True  # a form that the template does not know


def describe_boundary(template: ConversationTemplate) -> str:
    text = template.continuation([QUESTION], ANSWER, [QUESTION], ()).text
    if text.startswith(tuple(template.special_tokens.values())):
        return ""
    return (
        "The chat template ends an answer by plain text, not by a special token. An episode tokenizes it by itself, "
        "so its tokens may differ from those of the whole text."
    )


def describe_tools(template: ConversationTemplate) -> str:
    if PROBE in template.render([QUESTION], [{"type": "function", "function": PROBE_TOOL}]):
        return ""
    return "The chat template does not tell the model of its tools: describe them in the prompts."


def describe_results(template: ConversationTemplate) -> str:
    if template.shows_results_of_calls or template.shows_results_without_calls:
        return ""
    return "The chat template takes no tool results: the model gets them as a user message."


def describe_parallel_calls(template: ConversationTemplate) -> str:
    if not template.shows_results_of_calls:
        return ""
    answer = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL, PROBE_CALL]}
    for form in call_forms(answer):
        if len(form["tool_calls"]) == 2:
            try:
                template.render([QUESTION, form, PROBE_RESULT, PROBE_RESULT])
                return ""
            except TemplateError:
                pass
    return f"The chat template refuses answers with several tool calls. {KEEPS}"


def shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")
