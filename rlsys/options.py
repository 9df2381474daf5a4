"""Options of functions: their keyword-only arguments. What the configuration says to them, and what is refused."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any


def options(function: Callable[..., Any], section: Any, **more: Any) -> dict[str, Any]:
    """The keyword-only arguments of `function` that have a field of their name in `section`, or are among `more`.

    A null leaves the function's own default. A user's function asks for what it wants by naming it.
    """
    there = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)} | more
    return {name: there[name] for name in names(function) if there.get(name) is not None}


def names(function: Callable[..., Any]) -> list[str]:
    """Of the keyword-only arguments."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def refuse(function: str, given: dict[str, Any], known: Sequence[str], numbers: Sequence[str]) -> None:
    """Raises a sentence for an option that is not known, and for one of `numbers` that is not a number of 0 or more."""
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{function}: unknown option {name}={value!r}; known: {', '.join(known) or 'none'}.")
        if name in numbers and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{function}: {name} is {value!r}; it must be a finite number of 0 or more.")
