"""Says in a sentence that vLLM cannot run a model here, instead of ending in an exception of a library."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rlsys.errors import ConfigError

NOT_THE_MODEL = ("allocate", "memory", "Engine core")  # a machine that is short of something, or a process that died


@contextmanager
def refusing_model(model: str) -> Iterator[None]:
    """Turns what vLLM raises while it builds an engine into a refusal, which ends the run."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError | OSError | MemoryError) or any(w in str(error) for w in NOT_THE_MODEL):
            raise
        raise ConfigError(
            f"model.path: the engines cannot run {model} here: {reason(error)}. "
            "Use another model, or a machine on which vLLM runs it."
        ) from None


def reason(error: Exception) -> str:
    """Returns what vLLM says, in one line, or where it failed without a word."""
    details = error.errors() if hasattr(error, "errors") else []
    first, *more = (str(details[0]["msg"]) if details else str(error)).strip().split("\n")
    text = f"{first} {more[0].strip()}" if first.endswith(":") and more else first
    if not details:
        text = f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} in {where(error)}"
    return text.rstrip(".")


def where(error: Exception) -> str:
    """Returns the function that raised it, such as `Attention.forward`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code.co_qualname
