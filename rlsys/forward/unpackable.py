"""Refuses a model whose layers cannot compute packs of sequences, in words of the model instead of a library's."""

import contextlib
import traceback
from collections.abc import Iterator

from rlsys.errors import ConfigError

# What layers raise that are not made for packs.
LAYER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
NOT_THE_LAYERS = ("OutOfMemoryError", "DistError")  # RuntimeErrors that a machine causes


@contextlib.contextmanager
def refusing_unpackable(path: str, family: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a library raises for a model whose layers cannot compute packs into a refusal."""
    try:
        yield
    except errors as error:
        if isinstance(error, ConfigError) or any(kind.__name__ in NOT_THE_LAYERS for kind in type(error).__mro__):
            raise
        raise ConfigError(
            f"model.path: {path} is a {family} model, which rlsys cannot train in packs of sequences: {describe(error)}. "
            "rlsys/models/README.md lists models that it can."
        ) from error


def describe(error: Exception) -> str:
    """Returns what a layer says, or which layer raised an error that was not meant for readers."""
    text = str(error).partition("\n")[0].rstrip(".")
    if isinstance(error, ValueError):
        return text
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [type(f["self"]).__name__ for f in frames if hasattr(f.get("self"), "named_modules")]
    layer = layers[-1] if layers else "the model"
    if isinstance(error, KeyError) and "rlsys_packed" in text:
        return f"{layer} knows only attention of its own"
    if "must match the size" in text:  # it reckons with a batch of rows, or with another mask
        return f"{layer} does not take several sequences in one row ({text})"
    return f"{layer} raises {type(error).__name__} {text}".rstrip()
