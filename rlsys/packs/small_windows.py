"""Gives a model small sliding windows for a while, so that short sequences show what its windows do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, TypeGuard

import torch

SMALL = 6  # tokens


def has_large_window(decoder: Any) -> bool:
    window = getattr(decoder.config, "sliding_window", None)
    return isinstance(window, int) and window > SMALL


@contextmanager
def small_windows(decoder: Any) -> Iterator[None]:
    """Patch: while it is open, the decoder's configuration and modules have windows of `SMALL` tokens."""
    config, window = decoder.config, decoder.config.sliding_window
    changed = window_attributes(decoder)
    compiles = "torch._dynamo" in sys.modules  # nothing is compiled for a window that training does not have
    try:
        config.sliding_window = SMALL
        for module, name, _, small in changed:
            setattr(module, name, small)
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        config.sliding_window = window
        for module, name, own, _ in changed:
            setattr(module, name, own)


def window_attributes(decoder: Any) -> list[tuple[Any, str, int, int]]:
    """What modules keep of the window, as `(module, attribute, value, value with a small window)`.

    It is what differs in a decoder that is built for a small window. On the meta device it takes no memory.
    """
    config = deepcopy(decoder.config)
    config.sliding_window = SMALL
    with torch.device("meta"):
        built = dict(type(decoder)(config).named_modules())
    return [
        (module, attribute, value, small)
        for name, module in decoder.named_modules()
        if name in built
        for attribute, value in vars(module).items()
        if is_number(value) and is_number(small := vars(built[name]).get(attribute)) and small != value
    ]


def is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
