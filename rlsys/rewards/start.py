"""What built-in functions do once before the first sample: load what they need, and say how they will work."""

from collections.abc import Callable
from typing import Any

from rlsys.rewards import code, mathematics, model, services

PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    "math": mathematics.prepare,
    "code": code.prepare,
    "http": services.prepare,
    "judge": services.prepare,
    "model": model.prepare,
}
NOTES: dict[str, Callable[[], str]] = {"code": code.note}
