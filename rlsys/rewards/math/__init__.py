"""The reward `math`: final answers found, normalized and compared. Others import what they need from here: see README.md."""

from rlsys.rewards.math.final_answer import boxed_answer
from rlsys.rewards.math.math_reward import math, prepare

__all__ = ("boxed_answer", "math", "prepare")
