"""Reward functions: what is built in, and the one signature a user's function has.

    def reward(prompt, completion, answer, **row) -> float | dict[str, float]

A function asks by name for only what it wants: `prompt` and `completion` are texts, `finish` is "stop" or "length", anything
else is a field of the data row. It may return a number, or named components that are added up and logged. It may raise.
"""

from rlsys.rewards.functions import REWARDS
from rlsys.rewards.judge import Judge

__all__ = ["REWARDS", "Judge"]
