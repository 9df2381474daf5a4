"""The built-in rewards by name, and what there is to check in their options. The package says what a reward function is."""

from collections.abc import Callable
from typing import Any

from rlsys.rewards import model, services, shape, structure, tags, text
from rlsys.rewards.arithmetic import countdown
from rlsys.rewards.code.program import check_code as check_code
from rlsys.rewards.code.program import code
from rlsys.rewards.math.math_reward import math
from rlsys.tasks.zigzag import is_zigzag


def zigzag(prompt: str, completion: str, finish: str) -> float:
    """1 if the completion is the prompt's digits in a zigzag order, and ends there."""
    return float(finish == "stop" and sorted(completion) == sorted(prompt.rstrip(">")) and is_zigzag(completion))


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": text.exact,
    "contains": text.contains,
    "regex": text.regex,
    "math": math,
    "code": code,
    "countdown": countdown,
    "json_schema": structure.json_schema,
    "format": tags.format,
    "length": shape.length,
    "repetition": shape.repetition,
    "http": services.http,
    "judge": services.judge,
    "model": model.model,
    "zigzag": zigzag,
}

CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "regex": text.check_regex,
    "code": check_code,
    "json_schema": structure.check_json_schema,
    "format": tags.check_format,
    "length": shape.check_length,
    "repetition": shape.check_repetition,
    "http": services.check_http,
    "judge": services.check_judge,
    "model": model.check_model,
}
