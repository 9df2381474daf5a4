"""The reward of `reasoning_gym:TASK`: the package's own score, between 0 and 1."""

import re
from typing import Any

from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.text import MAX_VOTE_CHARS
from rlsys.tasks.gym import make_dataset


def reasoning_gym(completion: str, reasoning_gym: list[Any] | None = None, *, tag: str = "answer") -> AnswerScore:
    """The score of the last `<answer>…</answer>`, or of the whole completion where there is none.

    `tag`: another name of the tag; "" takes the whole completion always. An answer that the package cannot read is
    wrong.
    """
    if reasoning_gym is None:
        raise ValueError("reasoning_gym judges rows of reasoning_gym:TASK only.")
    task, settings, number = reasoning_gym
    dataset = make_dataset(task, settings)
    name = re.escape(tag)
    answers = re.findall(rf"<{name}>(.*?)</{name}>", completion, re.DOTALL) if tag else []
    answer = (answers[-1] if answers else completion).strip()
    question = dataset[number]
    value = score(dataset, answer, question)
    if value >= 1 and score(dataset, "no answer to this", question) >= 1:
        raise ValueError(
            f"reasoning_gym:{task}: the package's score takes any answer for right. Name another reward, such as `exact`."
        )
    return AnswerScore(value, answer[:MAX_VOTE_CHARS])


def score(dataset: Any, answer: str, question: dict[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer, question))
    except MemoryError:
        raise
    except Exception:  # some tasks raise for an answer in another form, instead of returning 0
        dataset.score_answer(question["answer"], question)  # raises too, if it is not the answer's fault
        return 0.0
