"""Finds problems with reward functions, as far as possible without running a user's file."""

import difflib
import inspect
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlsys.config.options import keyword_options
from rlsys.config.plugins import short_name, user_function_problems
from rlsys.config.schema import RewardFunction
from rlsys.config.secrets import redact, referenced_variables, resolve_env
from rlsys.errors import ConfigError
from rlsys.rewards.functions import CHECKS, REWARDS


def find_problems(key: str, functions: dict[str, RewardFunction]) -> list[str]:
    """Returns a sentence per problem with the functions of one option, `key`, such as reward.functions."""
    problems = []
    for name, f in functions.items():
        problems += function_problems(key, name, f)
    for name, count in Counter(map(short_name, functions)).items():
        if count > 1:
            problems.append(
                f"{key} has {count} functions called {name}, whose metrics would be one. Give them different names, "
                f"such as my_{name}: {{function: …}}."
            )
    return problems


def function_problems(key: str, name: str, f: RewardFunction) -> list[str]:
    try:
        resolve_env(f.options)
    except ConfigError as error:
        return [f"{key}.{name}: {error}"]
    problems = []
    if f.function in REWARDS:
        problems += option_problems(f"{key}.{name}", f, REWARDS[f.function])
    elif ":" in f.function:
        problems += user_function_problems(key, f.function)
    else:
        near = difflib.get_close_matches(f.function.lower(), REWARDS, 1)
        problems.append(
            f"{key} is `{f.function}`; known: {', '.join(REWARDS)}, or module:function."
            + (f" Did you mean `{near[0]}`?" if near else "")
        )
    if f.deadline_s is not None and not 0 < f.deadline_s < math.inf:
        problems.append(f"{key}.{name}.deadline_s is {f.deadline_s}; it must be a number of seconds above 0, or null.")
    if not math.isfinite(f.weight):
        problems.append(f"{key}: the weight of {name} is {f.weight}; it must be a finite number.")
    return problems


def option_problems(key: str, f: RewardFunction, function: Callable[..., Any]) -> list[str]:
    """Returns a sentence for options that the function does not have, or values it cannot use."""
    known = keyword_options(function)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        known = [*known, *f.options]
    for option in f.options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            way_out = f" Did you mean `{near[0]}`?" if near else f" It has {', '.join(known) or 'none'}."
            return [f"{key} has no option `{option}`.{way_out}"]
    try:
        if f.function in CHECKS:
            CHECKS[f.function](resolve_env(f.options))
    except ConfigError as error:
        return [f"{key}: {redact(problem, referenced_variables(f.options))}" for problem in error.problems]
    return []
