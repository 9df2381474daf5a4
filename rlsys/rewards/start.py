"""What built-in functions do once before the first sample: load what they need, and say how they will work."""

from collections.abc import Callable
from typing import Any

from rlsys.rewards import model, services
from rlsys.rewards.code import program
from rlsys.rewards.math import math_reward

PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    "math": math_reward.prepare,
    "code": program.prepare,
    "http": services.prepare,
    "judge": services.prepare,
    "model": model.prepare,
}
NOTES: dict[str, Callable[[], str]] = {"code": program.isolation_note}
