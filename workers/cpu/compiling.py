"""Compiling on CPU: torch's inductor writes C++, and a compiler of this machine makes it a library."""

import os
import shutil

from rlsys.config.schema import ConfigError


def allow_compiling(option: str, otherwise: str) -> None:
    """From now on, in this process. A nursery has imported torch as most engines need it, for whom nothing is compiled."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise ConfigError(
            f"{option} needs a C++ compiler on every machine that computes so, and {compiler} is not found on this one. "
            f"Install one (apt-get install g++), name one in CXX, or use {otherwise}."
        )
    os.environ.pop("TORCH_COMPILE_DISABLE", None)  # vLLM looks at it
    dynamo.disable = False
    inductor.compile_threads = 1  # in this process: others would stay when all is compiled
