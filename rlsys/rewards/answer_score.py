"""A score together with the final answer it belongs to."""

from typing import Self


class AnswerScore(float):
    """A number that carries the answer which majority votes count. `AnswerScore(1.0, "42")`"""

    answer: str

    def __new__(cls, score: float, answer: str) -> Self:
        instance = super().__new__(cls, score)
        instance.answer = answer
        return instance
