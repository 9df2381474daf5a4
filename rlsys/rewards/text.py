"""Rewards that compare texts: `exact`, `contains`, `regex`."""

import re
from typing import Any

from rlsys.errors import ConfigError
from rlsys.rewards.answer_score import AnswerScore

MAX_VOTE_CHARS = 1000  # of an answer that majority votes count


def exact(completion: str, answer: Any, *, ignore_case: bool = False, after: str = "") -> AnswerScore:
    """1 if the completion is the answer, or one of a list of answers; blanks at the ends are ignored.

    `after`: only the text after the last such mark counts, such as "####" or "</think>"; a completion without the mark
    has no answer.
    """
    text = fold_case(text_after(completion, after), ignore_case)
    accepted = [fold_case(a, ignore_case) for a in accepted_answers("exact", answer)]
    return AnswerScore(text in accepted, text[:MAX_VOTE_CHARS])


def contains(completion: str, answer: Any, *, ignore_case: bool = False, after: str = "") -> float:
    """1 if the answer, or one of a list of answers, occurs in the completion. `after` as for `exact`."""
    text = fold_case(text_after(completion, after), ignore_case)
    return float(any(fold_case(a, ignore_case) in text for a in accepted_answers("contains", answer)))


def regex(
    completion: str,
    answer: Any = None,
    *,
    pattern: str,
    group: int | str | None = None,
    whole: bool = False,
    ignore_case: bool = False,
    multiline: bool = False,
    dot_all: bool = False,
) -> float:
    """1 if the completion matches the pattern; with `group`, if that group of the last match is the answer.

    `whole`: the pattern must match all of the completion. `multiline` and `dot_all` are Python's re.M and re.S.
    """
    flags = re.I * ignore_case | re.M * multiline | re.S * dot_all
    match = re.fullmatch(pattern, completion, flags) if whole else last_match(re.finditer(pattern, completion, flags))
    if group is None:
        return float(match is not None)
    accepted = [fold_case(a, ignore_case) for a in accepted_answers("regex", answer)]
    text = fold_case((match[group] or "") if match else "", ignore_case)
    return AnswerScore(match is not None and text in accepted, text)


def last_match(matches: Any) -> re.Match[str] | None:
    match = None
    for match in matches:  # noqa: B007
        pass
    return match


def text_after(text: str, mark: str) -> str:
    """Returns the text after the last mark; nothing if there is none."""
    if not mark:
        return text
    return text.rpartition(mark)[2] if mark in text else ""


def fold_case(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


def accepted_answers(function: str, answer: Any) -> list[str]:
    """Returns the row's answers as texts. Raises if there is none, or a blank one."""
    answers = [str(a).strip() for a in (answer if isinstance(answer, list | tuple) else [answer]) if a is not None]
    if not answers or not all(answers):
        raise ValueError(
            f"{function}: the row's answer is {answer!r}, nothing to compare with. Leave such rows out, or name the "
            "right field with data.answer_key."
        )
    return answers


def check_regex(options: dict[str, Any]) -> None:
    pattern, group = options.get("pattern"), options.get("group")
    if not pattern or not isinstance(pattern, str):
        raise ConfigError(f"`pattern` is {pattern!r}; give a regular expression, such as '^\\d+$' in single quotes.")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"`pattern` {pattern!r} is not a regular expression: {error}.") from error
    groups = [*range(compiled.groups + 1), *compiled.groupindex]
    if group is not None and group not in groups:
        raise ConfigError(
            f"`group` is {group!r}; the pattern {pattern!r} has the groups {', '.join(map(str, groups))}."
        )
