"""Options of functions: their keyword arguments. What the configuration says to them, and what is refused."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rlsys.config.schema import ConfigError


def select_options(function: Callable[..., Any], section: Any, **more: Any) -> dict[str, Any]:
    """The keyword arguments of `function` that have a field of their name in `section`, or are among `more`.

    A null leaves the function's own default. A user's function asks for what it wants by naming it.
    """
    there = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)} | more
    return {name: there[name] for name in keyword_options(function) if there.get(name) is not None}


def keyword_options(function: Callable[..., Any]) -> list[str]:
    """Of its options: keyword-only arguments, and others that have a default."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    ]


def reject_unused_options(
    function: Callable[..., Any], section: Any, kind: str, table: Mapping[str, Sequence[str]]
) -> None:
    """Raises `ConfigError` for options of `table` that are set and that a user's function does not take."""
    spec = getattr(section, kind)
    if spec in table:
        return  # the configuration's own check has looked
    for option in sorted({o for known in table.values() for o in known} - set(keyword_options(function))):
        if (value := getattr(section, option)) is not None:
            raise ConfigError(
                f"algorithm.{option} is {value}, but algorithm.{kind} {spec} has no argument of that name; it has "
                f"{', '.join(keyword_options(function)) or 'none'}. Add one, or leave the option out."
            )


def validate_options(
    function: str, given: dict[str, Any], known: Sequence[str], numbers: Sequence[str]
) -> dict[str, Any]:
    """The given options without nulls. Raises a sentence for an unknown one, and for one of `numbers` that is no number of 0 or more."""
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{function}: unknown option {name}={value!r}; known: {', '.join(known) or 'none'}.")
        if name in numbers and value is not None and not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            raise ValueError(f"{function}: {name} is {value!r}; it must be a finite number of 0 or more.")
    return {name: value for name, value in given.items() if value is not None}
