"""Options of functions are their keyword arguments: how the configuration fills them, and which it refuses."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rlsys.errors import ConfigError


def select_options(function: Callable[..., Any], section: Any, **more: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `function` that are fields of `section`, or are among `more`.

    A null leaves the function its own default. A user's function gets an option by naming it as an argument.
    """
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)} | more
    return {name: values[name] for name in keyword_options(function) if values.get(name) is not None}


def keyword_options(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's options: keyword-only arguments, and others that have a default."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    ]


def reject_unused_options(
    function: Callable[..., Any], section: Any, kind: str, table: Mapping[str, Sequence[str]]
) -> None:
    """Raises `ConfigError` for an option of `table` that is set, but that a user's function does not take."""
    spec = getattr(section, kind)
    if spec in table:
        return  # `rlsys.checks` has checked the built-in functions
    accepted = keyword_options(function)
    for option in sorted({option for options in table.values() for option in options} - set(accepted)):
        if (value := getattr(section, option)) is not None:
            raise ConfigError(
                f"algorithm.{option} is {value}, but algorithm.{kind} {spec} has no argument of that name; it has "
                f"{', '.join(accepted) or 'none'}. Add one, or leave the option out."
            )


def require_shape(key: str, result: Any, count: int, unit: str) -> None:
    """Raises `ConfigError` unless a user's function, named by option `key`, returned one number per token or sample."""
    if getattr(result, "shape", None) != (count,):
        returned = f"a tensor {list(result.shape)}" if hasattr(result, "shape") else f"a {type(result).__name__}"
        raise ConfigError(
            f"{key}: the function returned {returned} for {count} {unit}s; it must return a tensor with one number per {unit}, "
            f"[{count}]."
        )


def validate_options(
    function: str, options: dict[str, Any], known: Sequence[str], numbers: Sequence[str]
) -> dict[str, Any]:
    """Returns the options without nulls.

    Raises `ValueError` for an unknown option, and for one of `numbers` that is not a finite number of 0 or more.
    """
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{function}: unknown option {name}={value!r}; known: {', '.join(known) or 'none'}.")
        if name in numbers and value is not None and not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            raise ValueError(f"{function}: {name} is {value!r}; it must be a finite number of 0 or more.")
    return {name: value for name, value in options.items() if value is not None}
