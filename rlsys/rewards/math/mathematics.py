"""`math`: whether a completion's final answer is mathematically the right one.

completion ─▶ final_answer ─▶ latex.plain ─▶ equality.same, which cuts into parts ─▶ each: quantity, or symbolic
Any of them may say no. None evaluates what the completion says as code, and none raises for it.
"""

from decimal import Decimal
from math import isfinite
from typing import Any

from rlsys.rewards.math.equality import MOST_PARTS, choice, is_text, named, readings, same, without_degrees
from rlsys.rewards.math.final_answer import BOX, boxed, final_answer
from rlsys.rewards.math.latex import plain, squeezed
from rlsys.rewards.math.quantity import number, with_unit
from rlsys.rewards.scored import Scored


def math(completion: str, answer: Any, *, boxed_only: bool = False) -> Scored:
    """1 if the completion's final answer is mathematically equal to `answer`.

    The last box that says anything is the answer; boxes joined by "and", "or" or a comma are one answer of several parts. Without
    a box it is what follows `####` or "the answer is", or the last formula or number; with `boxed_only` it is nothing.
    Unordered: `a, b`, `a or b`, `a ± b` and sets. Ordered: tuples, vectors, matrices. `x = 3` is 3; 28 % is 28 and 0.28; other
    units count where both sides name one. A decimal is exact, or has six digits that are those of an exact number. What is neither
    number nor expression is compared as a text. An expression that is not simplified is equal to the simplified one.
    """
    right = gold(answer)
    said = plain(final_answer(completion, boxed_only))
    return Scored(bool(said) and same(right, said), vote(said) if said else "")


def gold(answer: Any) -> str:
    """The reference in one way of writing: a number, a text, a solution with a box or with `####`, or a list of answers."""
    if isinstance(answer, float) and isfinite(answer):
        answer = f"{Decimal(repr(answer)):f}"
    text = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    text = text.rpartition("####")[2]
    text = plain(boxed(text) if BOX.search(text) else text)
    if answer is None or text in ("", "nan"):
        raise ValueError(
            f"math: the row's answer is {answer!r}, nothing to compare with. Leave such rows out of the data."
        )
    return text


def vote(text: str) -> str:
    """One text for equal answers, as far as that goes without comparing them.  "\\frac{2}{4}" -> "1/2";  "x = 3 or 1" -> "1, 3" """
    if letter := choice(text):
        return letter
    kind, listed = readings(named(text)[1])[0]
    votes = [_vote(named(part)[1]) for part in listed[:MOST_PARTS]]
    if kind in ("one", "list", "{}"):
        return ", ".join(sorted(votes))
    return f"{kind[0]}{', '.join(votes)}{kind[-1]}" if len(kind) == 2 else f"{kind} of {', '.join(votes)}"


def _vote(text: str) -> str:
    from rlsys.rewards.math import symbolic

    core = without_degrees(with_unit(text)[0]).rstrip("% ")
    if (value := number(core)) is not None:
        return str(value)
    expression = None if is_text(core) else symbolic.parsed(core)
    return squeezed(core)[:200] if expression is None else symbolic.written(expression)


def prepare(options: dict[str, Any]) -> None:
    """Loads sympy and the parser before the first sample comes, which takes a second."""
    same("x + 1", "1 + x")
