"""Compilation on CPU: torch's inductor writes C++, and a compiler of this machine turns it into a library."""

import os
import shutil

from rlsys.errors import ConfigError


def allow_compiling(option: str, alternative: str) -> None:
    """Enables compilation in this process. It is disabled at first, because most workers compile nothing."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise ConfigError(
            f"{option} needs a C++ compiler on every machine that computes so, and {compiler} is not found on "
            f"this one. Install one (apt-get install g++), name one in CXX, or use {alternative}."
        )
    os.environ.pop("TORCH_COMPILE_DISABLE", None)  # vLLM reads it
    dynamo.disable = False
    inductor.compile_threads = 1  # compile in this process: compile workers would stay when everything is compiled
