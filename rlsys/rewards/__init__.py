"""Reward functions: those built in, and the signature of a user's own.

    def reward(prompt, completion, answer, **row) -> float | dict[str, float]

A function gets what its parameters name: `prompt` and `completion` are texts, `answer` is the row's field that
`data.answer_key` names (None if a row has none), `finish` is "stop" or "length", `tokens` is the length of the
completion, `messages` the chat, `source` the data set. Any other name is a field of the data row, or an option from the
configuration. Of an episode, `messages` is the transcript, in which a tool call that cannot be read has its `error`;
`completion` is all that the model wrote, and `finish` may also be "turns", "tokens" or "window". `transcript` is the
same as `messages`, and exists in episodes alone.

A function returns a number, or named components, which are added up and logged; `answer` among them is the final answer
it read. It may raise: then the sample has no verdict. It may be async. With `completions` instead of `completion` it
judges a list at a time.
"""

from rlsys.rewards.answer_score import AnswerScore
from rlsys.rewards.functions import REWARDS
from rlsys.rewards.judge import Judge

__all__ = ["REWARDS", "AnswerScore", "Judge"]
