"""`math`: whether a completion's final answer is mathematically the right one.

completion ─▶ final_answer ─▶ latex.plain ─▶ equality.same, which cuts into parts ─▶ each: quantity, or symbolic
Any of them may say no. None evaluates what the completion says as code, and none raises for it.
"""

from decimal import Decimal
from math import isfinite
from typing import Any

from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.math.equality import (
    MAX_PARTS,
    choice_letter,
    drop_degrees,
    is_text,
    possible_readings,
    same_answer,
    split_name,
)
from rlsys.rewards.math.final_answer import BOX, boxed_answer, final_answer
from rlsys.rewards.math.latex import comparison_key, normalize_latex
from rlsys.rewards.math.quantity import parse_number, split_unit


def math(completion: str, answer: Any, *, boxed_only: bool = False) -> AnswerScore:
    """1 if the completion's final answer is mathematically equal to `answer`.

    The last box that says anything is the answer; boxes joined by "and", "or" or a comma are one answer of several parts. Without
    a box it is what follows `####` or "the answer is", or the last formula or number; with `boxed_only` it is nothing.
    Unordered: `a, b`, `a or b`, `a ± b` and sets. Ordered: tuples, vectors, matrices. `x = 3` is 3; 28 % is 28 and 0.28; other
    units count where both sides name one. A decimal is exact, or has six digits that are those of an exact number. What is neither
    number nor expression is compared as a text. An expression that is not simplified is equal to the simplified one.
    """
    right = normalize_reference(answer)
    said = normalize_latex(final_answer(completion, boxed_only))
    return AnswerScore(bool(said) and same_answer(right, said), vote_key(said) if said else "")


def normalize_reference(answer: Any) -> str:
    """The reference in one way of writing: a number, a text, a solution with a box or with `####`, or a list of answers."""
    if isinstance(answer, float) and isfinite(answer):
        answer = f"{Decimal(repr(answer)):f}"
    text = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    text = text.rpartition("####")[2]
    text = normalize_latex(boxed_answer(text) if BOX.search(text) else text)
    if answer is None or text in ("", "nan"):
        raise ValueError(
            f"math: the row's answer is {answer!r}, nothing to compare with. Leave such rows out of the data."
        )
    return text


def vote_key(text: str) -> str:
    """One text for equal answers, as far as that goes without comparing them.  "\\frac{2}{4}" -> "1/2";  "x = 3 or 1" -> "1, 3" """
    if letter := choice_letter(text):
        return letter
    kind, listed = possible_readings(split_name(text)[1])[0]
    votes = [_vote(split_name(part)[1]) for part in listed[:MAX_PARTS]]
    if kind in ("one", "list", "{}"):
        return ", ".join(sorted(votes))
    return f"{kind[0]}{', '.join(votes)}{kind[-1]}" if len(kind) == 2 else f"{kind} of {', '.join(votes)}"


def _vote(text: str) -> str:
    from rlsys.rewards.math import symbolic

    core = drop_degrees(split_unit(text)[0]).rstrip("% ")
    if (value := parse_number(core)) is not None:
        return str(value)
    expression = None if is_text(core) else symbolic.parse_expression(core)
    return comparison_key(core)[:200] if expression is None else symbolic.canonical_text(expression)


def prepare(options: dict[str, Any]) -> None:
    """Loads sympy and the parser before the first sample comes, which takes a second."""
    same_answer("x + 1", "1 + x")
