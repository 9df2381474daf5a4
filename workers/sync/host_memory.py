"""All weights in one flat piece of anonymous memory, readable by other processes of the user without a file anywhere.

The memory is a memfd: others open `/proc/<pid>/fd/<n>`, and the kernel frees it with the last process that holds it, however
that process ends. `register()` teaches vLLM to load from such memory.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # plain values only; each transport's docstring says which
Weights = Iterator[tuple[str, Any]]
Place = tuple[str, str, list[int], int]  # name, dtype, shape, offset

BACKEND = "rlsys_host_memory"
ALIGN = 64


def places(manifest: list[tuple[str, str, list[int]]]) -> tuple[list[Place], int]:
    """Where each tensor lies, and how many bytes they take in all."""
    found, offset = [], 0
    for name, dtype, shape in manifest:
        found.append((name, dtype, shape, offset))
        offset += -(-math.prod(shape) * WIDTH[dtype] // ALIGN) * ALIGN
    return found, offset


WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


class HostMemory:
    """The owner's end. Lives as long as its process."""

    def __init__(self, size: int):
        import torch

        self.fd = os.memfd_create("rlsys-weights")
        os.ftruncate(self.fd, max(size, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.bytes = torch.from_file(self.path, shared=True, size=max(size, 1), dtype=torch.uint8)

    def fill(self, layout: list[Place], tensors: Weights) -> None:
        for (name, dtype, shape, offset), (given, tensor) in zip(layout, tensors, strict=True):
            assert name == given, f"weights came in another order: {given} instead of {name}"
            view(self.bytes, dtype, shape, offset).copy_(tensor)


def view(memory: Any, dtype: str, shape: list[int], offset: int) -> Any:
    import torch

    size = math.prod(shape) * WIDTH[dtype]
    return memory[offset : offset + size].view(getattr(torch, dtype)).view(shape)


def register() -> None:
    """Called where vLLM's worker lives, before the engine is built."""
    import torch
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        path: str = ""
        size: int = 0
        layout: list[Place] = field(default_factory=list)

    class HostMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            memory = torch.from_file(update_info.path, shared=True, size=update_info.size, dtype=torch.uint8)
            self.model.load_weights(
                (name, view(memory, dtype, shape, offset)) for name, dtype, shape, offset in update_info.layout
            )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """vLLM up to 0.27 declares this abstract; our sender is not vLLM's."""
            raise AssertionError("the policy sends by itself")

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostMemoryEngine)
