"""Returns freed GPU memory to the device.

PyTorch keeps freed memory for its own process, so an engine on the same GPU could not use it.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def frees_gpu_memory(method: F) -> F:
    """Decorates a worker's method: after each call, if engines share its GPU, freed memory goes back to the device.

    Engines take their full share of the memory when they wake.
    """

    @functools.wraps(method)
    def call(worker: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return method(worker, *arguments, **options)
        finally:
            if worker.config.cluster.device == "gpu" and worker.config.cluster.placement == "colocated":
                import torch

                gc.collect()
                torch.cuda.empty_cache()

    return cast(F, call)
