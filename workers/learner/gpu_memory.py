"""What a process has freed of a GPU that it shares, given back to the device: PyTorch keeps it, where an engine cannot have it."""

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def frees_gpu_memory(method: F) -> F:
    """After each call of a worker's method, if engines share its GPU: they take all that they were promised when they wake."""

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
