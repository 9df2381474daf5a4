"""Reward functions: what is built in, and the one signature a user's function has.

    def reward(prompt, completion, answer, **row) -> float | dict[str, float]

A function asks by name for only what it wants: `prompt` and `completion` are texts, `answer` is the row's field that
`data.answer_key` names (None where a row has none), `finish` is "stop" or "length", `tokens` how many the completion has, `messages` the chat, `source` the
data set; anything else is a field of the data row, or an option from the configuration. It may return a number, or named
components that are added up and logged; with them may come `answer`, the text it took for the final answer. It may raise: then
the sample has no verdict. It may be async, and with `completions` instead of `completion` it judges a list at a time.
"""

from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.functions import REWARDS
from rlsys.rewards.judge import Judge

__all__ = ["REWARDS", "AnswerScore", "Judge"]
