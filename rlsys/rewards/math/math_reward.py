"""The reward `math`: compares a completion's final answer with the reference, mathematically.

completion ─▶ final_answer ─▶ latex.normalize_latex ─▶ equality.same_answer ─▶ each part: quantity, or symbolic

None of them runs a completion as code, and none raises because of what it says.
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

    The last box that is not empty is the answer; boxes joined by "and", "or" or a comma are one answer of several
    parts. Without a box it is what follows `####` or "the answer is", or the last formula or number; with `boxed_only`
    it is nothing. Unordered: `a, b`, `a or b`, `a ± b` and sets. Ordered: tuples, vectors, matrices. `x = 3` is 3; 28 %
    is 28 and 0.28; other units count if both sides name one. A decimal must be exact, or agree with an exact number in
    six digits or more. What is neither number nor expression is compared as a text. An unsimplified expression equals
    its simplified form.
    """
    reference = normalize_reference(answer)
    final = normalize_latex(final_answer(completion, boxed_only))
    return AnswerScore(bool(final) and same_answer(reference, final), vote_key(final) if final else "")


def normalize_reference(answer: Any) -> str:
    """Normalizes the reference: a number, a text, a solution with a box or with `####`, or a list of answers."""
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
    """Returns a text that equal answers share, as far as possible without comparing them.

    "\\frac{2}{4}" -> "1/2";  "x = 3 or 1" -> "1, 3"
    """
    if letter := choice_letter(text):
        return letter
    kind, parts = possible_readings(split_name(text)[1])[0]
    keys = [_part_key(split_name(part)[1]) for part in parts[:MAX_PARTS]]
    if kind in ("one", "list", "{}"):
        return ", ".join(sorted(keys))
    return f"{kind[0]}{', '.join(keys)}{kind[-1]}" if len(kind) == 2 else f"{kind} of {', '.join(keys)}"


def _part_key(text: str) -> str:
    from rlsys.rewards.math import symbolic

    core = drop_degrees(split_unit(text)[0]).rstrip("% ")
    if (value := parse_number(core)) is not None:
        return str(value)
    expression = None if is_text(core) else symbolic.parse_expression(core)
    return comparison_key(core)[:200] if expression is None else symbolic.canonical_text(expression)


def prepare(options: dict[str, Any]) -> None:
    """Loads sympy and the parser before the first sample, which takes a second."""
    same_answer("x + 1", "1 + x")
