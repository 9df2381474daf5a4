"""Checks each option by itself: its choices and its range, which the schema states next to the option."""

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

RANGES: dict[str, Callable[[float], bool]] = {
    "greater than 0": lambda value: 0 < value < math.inf,
    "of 0 or more": lambda value: 0 <= value < math.inf,
    "between 0 and 1": lambda value: 0 <= value <= 1,
}
RECIPES = ("cispo", "dapo", "degrpo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "rloo")  # configs/<name>.yaml
OTHER_NAMES = {  # values of other libraries that are not spelled like ours
    ("algorithm.advantage", "ppo"): "PPO is algorithm.advantage gae: configs/ppo.yaml.",
    ("algorithm.advantage", "group_norm"): "Here that is grpo.",
    ("algorithm.loss", "vanilla"): "Here that is ppo_clip.",
    ("algorithm.loss", "token"): "Here that is ppo_clip.",
    ("algorithm.loss", "sequence"): "Here that is gspo.",
    ("algorithm.loss", "geo_mean"): "Here that is gmpo.",
    ("algorithm.loss", "clip_cov"): "That is an entropy.control here.",
    ("algorithm.loss", "kl_cov"): "That is an entropy.control here.",
    ("algorithm.loss", "ppo"): "PPO's loss is ppo_clip; the whole recipe is configs/ppo.yaml.",
    ("algorithm.normalize", "seq-mean-token-mean"): "Here that is sequence_mean.",
    ("algorithm.normalize", "seq-mean-token-sum"): "Here that is sequence_sum.",
    ("algorithm.normalize", "seq-mean-token-sum-norm"): "Here that is constant.",
    ("algorithm.normalize", "dapo"): "Here that is token_mean.",
    ("algorithm.normalize", "grpo"): "Here that is sequence_mean.",
    ("algorithm.normalize", "dr_grpo"): "Here that is constant.",
    ("algorithm.normalize", "bnpo"): "Here that is token_mean.",
    ("algorithm.normalize", "cispo"): "That is an algorithm.loss here.",
    ("algorithm.normalize", "sapo"): "That is an algorithm.loss here.",
    ("correction.method", "token_truncate"): "Here that is tis.",
    ("correction.method", "token_mask"): "Here that is mis.",
    ("correction.method", "sequence_truncate"): "Here that is sequence_tis.",
    ("correction.method", "sequence_mask"): "Here that is sequence_mis.",
    ("algorithm.kl", "low_var_kl"): "Here that is k3.",
    ("algorithm.kl", "k3+"): "Here that is k3_unbiased: the value of k3 with the gradient of k2.",
    ("algorithm.kl", "low_var_kl+"): "Here that is k3_unbiased: the value of k3 with the gradient of k2.",
    ("algorithm.kl", "k1+"): "In the loss, k2 has the same gradient.",
    ("algorithm.kl", "abs"): "There is no |log(π/ref)| here; k2 is ½ log²(π/ref).",
}


def check_values(section: Any, prefix: str = "") -> Iterator[str]:
    """Checks `section`: a `Config`, or one of its sections with its name as the prefix."""
    for option in fields(section):
        key, value = f"{prefix}{option.name}", getattr(section, option.name)
        allowed, must_be = option.metadata.get("choices"), option.metadata.get("range")
        if is_dataclass(value):
            yield from check_values(value, f"{key}.")
        if value is None:
            continue
        if allowed and value not in allowed and not (option.metadata["user_function"] and ":" in value):
            known = ", ".join(allowed) + ", or module:function" * option.metadata["user_function"]
            yield f"{key} is `{value}`; known: {known}.{suggest_value(key, value, allowed)}"
        if must_be and not RANGES[must_be](value):
            or_null = ", or null" if type(None) in get_args(option.type) else ""
            yield f"{key} is {value}; it must be a number {must_be}{or_null}."


def suggest_value(key: str, value: str, allowed: tuple[str, ...]) -> str:
    """Returns a sentence with what an unknown value probably stands for; empty if nothing comes close."""
    small = value.lower()
    if small in allowed:
        return f" Did you mean `{small}`?"
    if (key, small) in OTHER_NAMES:
        return f" {OTHER_NAMES[key, small]}"
    letters = re.sub("[^a-z]", "", small.replace("++", "pp"))
    recipe = [name for name in RECIPES if name.replace("_", "") == letters]
    if recipe and key in ("algorithm.advantage", "algorithm.loss"):
        return f" {value} is a recipe of several options: configs/{recipe[0]}.yaml."
    close = difflib.get_close_matches(small, allowed, 1)
    return f" Did you mean `{close[0]}`?" if close else ""
