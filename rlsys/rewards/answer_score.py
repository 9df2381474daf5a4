"""A score that tells which final answer it is of."""

from typing import Self


class AnswerScore(float):
    """A number like any other, with the answer that majority votes count. `Scored(1.0, "42")`"""

    answer: str

    def __new__(cls, score: float, answer: str) -> Self:
        made = super().__new__(cls, score)
        made.answer = answer
        return made
