"""Finds models that go on after their answer: their chat template ends a turn by a token at which no completion ends."""

from collections.abc import Collection

from rlsys.episodes.template import MARK, QUESTION, ConversationTemplate, TemplateError


def describe_turn_end(template: ConversationTemplate, end_ids: Collection[int]) -> str:
    """Returns a sentence if the template ends answers by a special token that is not among those that end completions.

    Base models are so: Qwen2.5 ends at <|endoftext|>, and its template writes <|im_end|>.
    """
    try:
        text = template.turn_end.lstrip() if template.chat_template else ""
        # Harmony writes another token after the last answer, at which the model ends, than after earlier ones.
        last = template.render([QUESTION, {"role": "assistant", "content": MARK}], opens_answer=False) if text else ""
    except TemplateError:
        return ""
    ends = [number for number, token in template.special_tokens.items() if token and text.startswith(token)]
    after_last = last.rpartition(MARK)[2].lstrip()
    if not ends or any(after_last.startswith(template.special_tokens.get(end, MARK)) for end in end_ids):
        return ""
    if set(ends) & set(end_ids):
        return ""
    end = max(ends, key=lambda number: len(template.special_tokens[number]))
    tokens = template.tokenizer.convert_ids_to_tokens(sorted(id for id in end_ids if id is not None))
    names = ", ".join(filter(None, tokens)) or "no token of the tokenizer"
    return (
        f"The chat template ends an answer by {template.special_tokens[end]}, and completions end at {names}. The model "
        "would go on with the next turn and be trained on what it invents there. Give "
        f"rollout.stop_token_ids: [{end}]."
    )
