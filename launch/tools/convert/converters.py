"""Converts rows of public data sets, as they are on the hub, to questions and answers. Pure functions."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.rewards.math import boxed_answer  # the reward reads boxes in the same way

BOXED = "Reason step by step and put the final answer in \\boxed{}."
COUNTDOWN = "Think step by step, then write the expression between <answer> and </answer>, such as <answer>(1 + 2) / 3</answer>."
# The instructions around every question of DAPO-Math-17k.
DAPO_BEFORE = re.compile(
    r"\s*Solve the following math problem step by step\..*?is the answer to the problem\.\s*", re.DOTALL
)
DAPO_AFTER = re.compile(r"""\s*Remember to put your answer on its own line after ["“]Answer:["”]\.?\s*$""")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """`Question("Natalia sold clips to 48 of her friends …", "72")`

    `Question("Use each …", facts={"numbers": [3, 5], "target": 8})`
    """

    text: str
    answer: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # further arguments of reward functions


@dataclass(frozen=True)
class Converter:
    """How one public data set is read."""

    hub: str
    subset: str
    convert: Callable[[Fields], Question]
    instruction: str  # follows every question
    about: str


def gsm8k(row: Fields) -> Question:
    """{question, answer: "48 / 2 = 24 … #### 1,072"} -> "1072" """
    _, mark, answer = _text(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("the answer has no `####` before its final number")
    return Question(_text(row, "question"), _not_empty(re.sub("[,$]", "", answer).strip().rstrip(".")))


def math(row: Fields) -> Question:
    """{problem, solution: "… \\boxed{\\frac{1}{2}}", level: "Level 3", type: "Algebra"} -> "\\frac{1}{2}" """
    subject = row.get("type") or row.get("subject")
    digits = re.search(r"\d+", str(row.get("level", "")))
    facts = {"level": int(digits[0])} if digits else {}
    return Question(
        _text(row, "problem"),
        last_boxed(_text(row, "solution")),
        facts | ({"subject": subject} if subject else {}),
    )


def dapo(row: Fields) -> Question:
    """{prompt: [{role, content}], reward_model: {ground_truth}}, without the instructions around the question."""
    messages, truth = row.get("prompt"), row.get("reward_model")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        raise ValueError("`prompt` is not a list of chat messages")
    if not isinstance(truth, dict):
        raise ValueError("there is no `reward_model` with a `ground_truth`")
    text = DAPO_AFTER.sub("", DAPO_BEFORE.sub("", _text(messages[-1], "content"), count=1))
    return Question(_not_empty(text), _answer(truth.get("ground_truth")))


def countdown(row: Fields) -> Question:
    """{target: 98, nums: [44, 19, 35]}"""
    numbers, target = row.get("nums", row.get("numbers")), row.get("target")
    whole = isinstance(numbers, list) and numbers and all(type(n) is int for n in numbers)
    if not whole or type(target) is not int:
        raise ValueError("`nums` is not a list of whole numbers, or `target` is none")
    named = ", ".join(map(str, numbers))  # type: ignore[arg-type]
    text = f"Use each of the numbers {named} exactly once, with + - * / and parentheses, to make {target}."
    return Question(text, facts={"numbers": numbers, "target": target})


def deepscaler(row: Fields) -> Question:
    """{problem, answer, solution}"""
    return Question(_text(row, "problem"), _answer(row.get("answer")))


def last_boxed(text: str) -> str:
    r"""The content of the last \boxed{…}, or of those joined to it.

    "\boxed{1}, or \boxed{\frac{1}{2}}" -> "1, \frac{1}{2}"
    """
    if not (answer := boxed_answer(text)):
        raise ValueError("the solution has no \\boxed{} that is closed and says something")
    return answer


def _text(row: Fields, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{key}` is not a text; the row has {', '.join(map(str, row)) or 'no fields'}")
    return value.strip()


def _answer(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError(f"the answer is not a text or a number; it is {value!r:.60}")
    return _not_empty("" if value is None else str(value))


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("the question or its answer is empty")
    return text.strip()


CONVERTERS = {
    "gsm8k": Converter(
        "openai/gsm8k", "main", gsm8k, BOXED, "grade-school mathematics: 7,473 questions, 1,319 in the split test"
    ),
    "math": Converter(
        "DigitalLearningGmbH/MATH-lighteval",
        "",
        math,
        BOXED,
        "competition mathematics, 12,500 questions in two splits and five levels",
    ),
    "dapo": Converter(
        "BytedTsinghua-SIA/DAPO-Math-17k", "", dapo, BOXED, "about 17,000 competition questions, each there many times"
    ),
    "countdown": Converter(
        "Jiayi-Pan/Countdown-Tasks-3to4",
        "",
        countdown,
        COUNTDOWN,
        "an expression from given numbers with a given value",
    ),
    "deepscaler": Converter(
        "agentica-org/DeepScaleR-Preview-Dataset", "", deepscaler, BOXED, "about 40,000 competition questions"
    ),
}
