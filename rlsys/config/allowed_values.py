"""Fields of the configuration with the values that they may have: choices and ranges. `rlsys.checks.values` checks them.

`gpu` is the default on GPUs, where it is another one.
"""

from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def one_of(*names: str, default: str | None = "", gpu: str | None = None, user_function: bool = False) -> Any:
    """An option with these choices, the first of which is the default. A user's function may be one more choice."""
    metadata = {"choices": names, "user_function": user_function, "gpu": gpu}
    return field(default=names[0] if default == "" else default, metadata=metadata)


def positive(default: T, gpu: T | None = None) -> T:
    return field(default=default, metadata={"range": "greater than 0", "gpu": gpu})


def not_negative(default: T) -> T:
    return field(default=default, metadata={"range": "of 0 or more"})


def share(default: T) -> T:
    return field(default=default, metadata={"range": "between 0 and 1"})
