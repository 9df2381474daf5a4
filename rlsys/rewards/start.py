"""What built-in functions do once before the first sample: load what they need, and say how they will work and how long."""

from collections.abc import Callable
from typing import Any

from rlsys.config import Function
from rlsys.rewards import code, mathematics, model, services

PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    "math": mathematics.prepare,
    "code": code.prepare,
    "http": services.prepare,
    "judge": services.prepare,
    "model": model.prepare,
}
NOTES: dict[str, Callable[[], str]] = {"code": code.note}
LONG = {"code": 6.0, "http": 30.0, "judge": 120.0}  # seconds of a call, if their option `timeout_s` does not say


def deadline(f: Function, timeout_s: float) -> float:
    """Seconds after which a function is stopped. One that has a time limit of its own gets to use it; 0: never."""
    if f.deadline_s is not None or not timeout_s:
        return f.deadline_s or timeout_s
    if f.function == "model":
        return max(timeout_s, 120.0)
    if f.function in LONG:
        return max(timeout_s, 2 * f.options.get("timeout_s", LONG[f.function]) + 5)  # so that one more try has a chance
    return timeout_s
