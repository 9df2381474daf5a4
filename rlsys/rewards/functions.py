"""The built-in rewards by name, with the check of their options, their preparation, and their note at the start."""

from collections.abc import Callable
from typing import Any

from rlsys.rewards import gym, model, services, shape, structure, tags, text
from rlsys.rewards.arithmetic import countdown
from rlsys.rewards.code import program
from rlsys.rewards.math import math, prepare
from rlsys.tasks.zigzag import is_zigzag


def zigzag(prompt: str, completion: str, finish: str) -> float:
    """1 if the completion is the prompt's digits in a zigzag order, and ends there."""
    return float(finish == "stop" and sorted(completion) == sorted(prompt.rstrip(">")) and is_zigzag(completion))


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": text.exact,
    "contains": text.contains,
    "regex": text.regex,
    "math": math,
    "code": program.code,
    "countdown": countdown,
    "json_schema": structure.json_schema,
    "format": tags.format,
    "length": shape.length,
    "repetition": shape.repetition,
    "http": services.http,
    "judge": services.judge,
    "model": model.model,
    "zigzag": zigzag,
    "reasoning_gym": gym.reasoning_gym,
}
# Raise `ConfigError` for options that cannot work.
CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "regex": text.check_regex,
    "code": program.check_code,
    "json_schema": structure.check_json_schema,
    "format": tags.check_format,
    "length": shape.check_length,
    "repetition": shape.check_repetition,
    "http": services.check_http,
    "judge": services.check_judge,
    "model": model.check_model,
}
# Load what a function needs, once before the first sample.
PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    "math": prepare,
    "code": program.prepare,
    "http": services.prepare,
    "judge": services.prepare,
    "model": model.prepare,
}
# Say how a function will work in this process, after `PREPARE`.
NOTES: dict[str, Callable[[], str]] = {"code": program.isolation_note}
