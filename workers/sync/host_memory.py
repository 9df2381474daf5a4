"""Flat anonymous memory for weights, readable by other processes of the user without a file anywhere.

The memory is a memfd: others open `/proc/<pid>/fd/<n>`, and the kernel frees it with the last process that holds it, however
that process ends. `register()` teaches vLLM to load from such memory.
"""

import math
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

from workers.sync.parallel import parallel_map

Message = dict[str, Any]  # plain values only; each transport's docstring says which
ManifestEntry = tuple[str, str, list[int]]  # name, dtype, shape
Slot = tuple[str, str, list[int], int]  # the same, and where it begins
NamedTensors = list[tuple[str, Any]]

BACKEND = "rlsys_host_memory"
ALIGN = 64
BUCKET_BYTES = 512 << 20  # bytes
LOAD_PIECES = 16  # in which an engine loads, on several cores
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def aligned_bytes(entry: ManifestEntry) -> int:
    _, dtype, shape = entry
    return -(-math.prod(shape) * DTYPE_BYTES[dtype] // ALIGN) * ALIGN


def plan_layout(manifest: list[ManifestEntry]) -> tuple[list[Slot], int]:
    """Where each tensor lies, and how many bytes they take in all."""
    found, offset = [], 0
    for entry in manifest:
        found.append((*entry, offset))
        offset += aligned_bytes(entry)
    return found, offset


def split_into_buckets(manifest: list[ManifestEntry], limit: int = BUCKET_BYTES) -> list[list[ManifestEntry]]:
    """Neighbours together, up to so many bytes. A tensor is never cut: one that is larger is a bucket of its own."""
    found: list[list[ManifestEntry]] = []
    room = 0
    for entry in manifest:
        if aligned_bytes(entry) > room:
            found.append([])
            room = limit
        found[-1].append(entry)
        room -= aligned_bytes(entry)
    return found


def tensor_view(memory: Any, dtype: str, shape: list[int], offset: int) -> Any:
    import torch

    size = math.prod(shape) * DTYPE_BYTES[dtype]
    return memory[offset : offset + size].view(getattr(torch, dtype)).view(shape)


def tensor_views(memory: Any, layout: list[Slot]) -> NamedTensors:
    return [(name, tensor_view(memory, dtype, shape, offset)) for name, dtype, shape, offset in layout]


class HostMemory:
    """The owner's end. Lives as long as its process."""

    def __init__(self, size: int):
        self.fd = os.memfd_create("rlsys-weights")
        os.ftruncate(self.fd, max(size, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.bytes = map_file(self.path)


def map_file(path: str) -> Any:
    import torch

    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


class CachedMapping:
    """The reader's end. What is mapped stays so, because the first look at each page is dear."""

    def __init__(self) -> None:
        self.which: tuple[int, int] | None = None

    def open(self, path: str) -> Any:
        found = os.stat(path)
        if self.which != (found.st_dev, found.st_ino):
            self.memory, self.which = map_file(path), (found.st_dev, found.st_ino)
        return self.memory


def readonly_tensor(array: Any) -> Any:
    """A tensor of the same bytes, which may be such that nobody may write to them, as Ray's are."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)


def register_backend() -> None:
    """Called where vLLM's worker lives, before the engine is built."""
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
        held: Any = None  # bytes of this process, in place of a path; they are only read
        layout: list[Slot] = field(default_factory=list)

    class HostMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.mapping, self.in_place = CachedMapping(), can_load_in_place(self.model)

        def start_weight_update(self) -> None:
            if not self.in_place:
                initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            memory = (
                self.mapping.open(update_info.path) if update_info.held is None else readonly_tensor(update_info.held)
            )
            tensors = tensor_views(memory, update_info.layout)
            if self.in_place:
                parallel_map(self.model.load_weights, [tensors[i::LOAD_PIECES] for i in range(LOAD_PIECES)])
            else:  # vLLM keeps tensors until all of a layer are there, and this memory may be used for others by then
                self.model.load_weights((name, tensor.clone()) for name, tensor in tensors)

        def finish_weight_update(self) -> None:
            if not self.in_place:
                finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """vLLM up to 0.27 declares this abstract; our sender is not vLLM's."""
            raise AssertionError("the policy sends by itself")

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostMemoryEngine)


def can_load_in_place(model: Any) -> bool:
    """Whether weights may be written straight into an engine's parameters: no layer computes with another form of them.

    So it is on CPU (`keep_weights_plain`), but for quantised weights, experts and latent attention.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    return current_platform.is_cpu() and all(
        isinstance(getattr(layer, "quant_method", None), plain)
        and (type(layer) is Attention or not is_deferred_attention_layer(layer))
        for layer in model.modules()
    )
