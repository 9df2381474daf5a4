"""Turns weighted reward functions into one verdict per sample."""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable
from typing import Any

from rlsys.config import ConfigError
from rlsys.plugins import find
from rlsys.rewards.functions import REWARDS
from rlsys.types import Verdict


class Judge:
    """`Judge({"exact": 1.0, "my.py:brevity": 0.1})(facts)` → a verdict; nothing a function does raises through it."""

    def __init__(self, functions: dict[str, float]):
        self.functions = [
            (spec.rpartition(":")[2], find(spec, REWARDS, "reward.functions"), weight)
            for spec, weight in functions.items()
        ]

    def __call__(self, facts: dict[str, Any]) -> Verdict:
        components: dict[str, float] = {}
        total = 0.0
        for name, function, weight in self.functions:
            try:
                result = _call(function, facts)
            except BaseException as error:  # SystemExit too: a user's function must not end the process unseen
                return Verdict(
                    None,
                    failure="exception",
                    detail=f"{name}: {type(error).__name__}: {error}\n{traceback.format_exc()}",
                )
            parts = {f"{name}/{k}": v for k, v in result.items()} if isinstance(result, dict) else {name: result}
            for part, value in parts.items():
                try:
                    score = float(value)
                except Exception:  # whatever the value's own __float__ raises
                    return Verdict(None, failure="invalid", detail=f"{part} returned {value!r}; a reward is a number.")
                if not math.isfinite(score):
                    return Verdict(None, failure="invalid", detail=f"{part} returned {score}; a reward must be finite.")
                components[part] = score
                total += weight * score
        return Verdict(total, components)


def _call(function: Callable[..., Any], facts: dict[str, Any]) -> Any:
    wanted = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in wanted.values()):
        given = facts
    else:
        given = {name: facts[name] for name in wanted if name in facts}
        missing = [n for n, p in wanted.items() if n not in facts and p.default is p.empty]
        if missing:
            raise ConfigError(f"it asks for {', '.join(missing)}, but a sample has only {', '.join(sorted(facts))}.")
    result = function(**given)
    return asyncio.run(result) if inspect.isawaitable(result) else result  # type: ignore[arg-type]
