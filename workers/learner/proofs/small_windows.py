"""Gives a model small sliding windows for a while, so that short sequences show what its windows do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, TypeGuard

import torch

from rlsys.forward.attention import declared_window
from rlsys.forward.context import pack_context

SMALL = 6  # tokens


def computes_large_windows(decoder: Any) -> bool:
    """Returns whether every layer with a window handed it to attention in the last pass, and it is larger than `SMALL`.

    Windows that attention would refuse are left as they are: an error within a layer leaves ZeRO 3's weights gathered.
    """
    handed = pack_context(decoder).windows
    windows = [window for module, window in handed.items() if window or declared_window(module)]
    known = is_number(getattr(decoder.config, "sliding_window", None))
    return known and bool(windows) and all(is_number(window) and window > SMALL for window in windows)


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
    """Returns what modules keep of the window, as `(module, attribute, value, value with a small window)`.

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
