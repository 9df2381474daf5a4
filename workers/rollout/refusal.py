"""Says in a sentence that vLLM cannot run a model here, instead of ending in an exception of a library."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlsys.config.schema import ConfigError

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
    """What vLLM says, in one line."""
    details = error.errors() if hasattr(error, "errors") else []
    text = str(details[0]["msg"]) if details else f"{type(error).__name__}: {error}"
    return text.strip().split("\n")[0].rstrip(".")
