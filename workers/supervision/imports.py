"""Importing libraries without what they would take along, and without what slows it down."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace


@contextlib.contextmanager
def hide_modules(*modules: str) -> Iterator[None]:
    """In between, these are not to be had, as if they were not installed; one that is imported already stays."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def skip_generation_import() -> Iterator[None]:
    """In between, transformers' tokenizers do without its `generate`, which takes half of what they take to import, torch's compiler with it.

    They name its mixin, to give it to models of remote code that lack it; in a process that loads such a model let this be.
    """
    import transformers.generation

    package, module, mixin = transformers.generation, "transformers.generation.utils", "GenerationMixin"
    if module in sys.modules:
        yield
        return
    sys.modules[module] = SimpleNamespace(**{mixin: type(mixin, (), {})})  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        vars(package).pop(mixin, None)  # where it keeps what it has found


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """In between, nothing looks for garbage: imports make a million objects, and hardly any. Nor is what is there at the end ever looked at again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
