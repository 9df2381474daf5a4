"""Faster imports: without libraries they would pull in, and without garbage collection."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

TARGET = "VLLM_TARGET_DEVICE"  # a variable of vLLM


@contextlib.contextmanager
def hide_modules(*modules: str) -> Iterator[None]:
    """Makes modules look as if they were not installed. A module that is imported already stays."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def skip_generation_import() -> Iterator[None]:
    """Patch: transformers' tokenizers are imported without `generate`, which is half of their import time.

    The tokenizers name its mixin, to give it to models of remote code that lack it. So a process that loads such a
    model must not use this.
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
        vars(package).pop(mixin, None)  # the package has cached the empty mixin


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector during imports: they make a million objects and hardly any garbage.

    Objects that exist at the end are never collected again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def vllm_on_cpu() -> Iterator[None]:
    """vLLM is imported without looking for a device: its parsers and web servers need none, and this process may have none."""
    before = os.environ.get(TARGET)
    os.environ[TARGET] = "cpu"
    try:
        from vllm import platforms

        assert platforms.current_platform  # looked for at its first use
        yield
    finally:
        del os.environ[TARGET]
        if before is not None:
            os.environ[TARGET] = before
