"""What the environments share: their packages, and the seed of a row."""

import hashlib
import importlib
import json
import re
from typing import Any

from rlsys.errors import ConfigError


def import_package(module: str, spec: str, extra: str) -> Any:
    """Imports a package that rlsys does not depend on. Raises `ConfigError` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f"{spec} needs the package {package}: pip install 'rlsys[{extra}]' ({error}).") from None


def row_seed(row: dict[str, Any]) -> int:
    """Returns the row's own `seed`; without one, a number that follows from the row."""
    seed = row.get("seed")
    if seed is None:
        text = json.dumps(row, sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"the row's seed is {seed!r:.80}; it must be a whole number of 0 or more.")
    return seed


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if re.search(r"\w", line)]
    return (lines or [type(error).__name__])[0].strip()[:300].rstrip(".?")
