"""Importing libraries without what they would take along, and without what slows it down."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*modules: str) -> Iterator[None]:
    """In between, these are not to be had, as if they were not installed; one that is imported already stays."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """In between, nothing looks for garbage: imports make a million objects, and hardly any. Nor is what is there at the end ever looked at again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
