"""Rewards that compare texts: `exact`, `contains`, `regex`."""

import re
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.rewards.answer_score import AnswerScore

MAX_VOTE_CHARS = 1000  # characters of an answer that is voted for


def exact(completion: str, answer: Any, *, ignore_case: bool = False, after: str = "") -> AnswerScore:
    """1 if the completion is the answer, or one of a list of answers; blanks at the ends aside.

    `after`: only what follows the last such mark counts, as "####" or "</think>"; a completion without it has no answer.
    """
    said = fold_case(text_after(completion, after), ignore_case)
    return AnswerScore(
        said in [fold_case(a, ignore_case) for a in accepted_answers("exact", answer)], said[:MAX_VOTE_CHARS]
    )


def contains(completion: str, answer: Any, *, ignore_case: bool = False, after: str = "") -> float:
    """1 if the answer, or one of a list of answers, occurs in the completion. `after` as for `exact`."""
    said = fold_case(text_after(completion, after), ignore_case)
    return float(any(fold_case(a, ignore_case) in said for a in accepted_answers("contains", answer)))


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
    """1 if the pattern is found in the completion; with `group`, if what the group caught in the last match is the answer.

    `whole`: the pattern must match all of the completion. `multiline` and `dot_all` are Python's re.M and re.S.
    """
    flags = re.I * ignore_case | re.M * multiline | re.S * dot_all
    found = re.fullmatch(pattern, completion, flags) if whole else last_match(re.finditer(pattern, completion, flags))
    if group is None:
        return float(found is not None)
    right = [fold_case(a, ignore_case) for a in accepted_answers("regex", answer)]
    said = fold_case((found[group] or "") if found else "", ignore_case)
    return AnswerScore(found is not None and said in right, said)


def last_match(matches: Any) -> re.Match[str] | None:
    found = None
    for found in matches:  # noqa: B007
        pass
    return found


def text_after(text: str, mark: str) -> str:
    """What follows the last mark; nothing if there is none."""
    if not mark:
        return text
    return text.rpartition(mark)[2] if mark in text else ""


def fold_case(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


def accepted_answers(function: str, answer: Any) -> list[str]:
    """The answers that count as right."""
    found = [str(a).strip() for a in (answer if isinstance(answer, list | tuple) else [answer]) if a is not None]
    if not found or not all(found):
        raise ValueError(
            f"{function}: the row's answer is {answer!r}, nothing to compare with. Leave such rows out, or name the right field "
            "with data.answer_key."
        )
    return found


def check_regex(options: dict[str, Any]) -> None:
    pattern, group = options.get("pattern"), options.get("group")
    if not pattern or not isinstance(pattern, str):
        raise ConfigError(f"`pattern` is {pattern!r}; give a regular expression, such as '^\\d+$' in single quotes.")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"`pattern` {pattern!r} is no regular expression: {error}.") from error
    groups = [*range(compiled.groups + 1), *compiled.groupindex]
    if group is not None and group not in groups:
        raise ConfigError(
            f"`group` is {group!r}; the pattern {pattern!r} has the groups {', '.join(map(str, groups))}."
        )
