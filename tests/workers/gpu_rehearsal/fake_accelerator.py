"""DeepSpeed's accelerator for CUDA with tensors in main memory: its streams and events only remember who waits for whom.

It replaces the accelerator of the process that imports this file, with DS_ACCELERATOR=cuda in its environment.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

TENSOR_TYPES = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")


class FakeEvent:
    def __init__(self, *_: Any, **__: Any):
        pass

    def nothing(self, *_: Any) -> None:
        pass

    record = wait = synchronize = nothing

    def query(self) -> bool:
        return True


class FakeStream:
    def __init__(self, *_: Any, **__: Any):
        pass

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, *_: Any) -> FakeEvent:
        return FakeEvent()

    def query(self) -> bool:
        return True


STREAMS = [FakeStream()]


@contextlib.contextmanager
def on_stream(stream: FakeStream | None) -> Iterator[None]:
    STREAMS.append(stream or STREAMS[-1])
    try:
        yield
    finally:
        STREAMS.pop()


class FakeCuda(CUDA_Accelerator):
    """Every branch for CUDA is taken, and every tensor lies on the CPU."""

    def __init__(self) -> None:
        self._name, self._communication_backend_name, self._compile_backend = "cuda", "gloo", "inductor"
        self._nvtx_domains: dict[str, Any] = {}

    Stream = property(lambda self: FakeStream)
    Event = property(lambda self: FakeEvent)

    def device_name(self, index: Any = None) -> str:
        return "cpu"

    current_device_name = device_name

    def device(self, index: Any = None) -> torch.device:
        return torch.device("cpu")

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    is_bf16_supported = is_available

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def stream(self, stream: FakeStream | None) -> Any:
        return on_stream(stream)

    def current_stream(self, index: Any = None) -> FakeStream:
        return STREAMS[-1]

    def default_stream(self, index: Any = None) -> FakeStream:
        return STREAMS[0]

    def on_accelerator(self, tensor: Any) -> bool:
        return True

    is_pinned = on_accelerator

    def pin_memory(self, tensor: Any, align_bytes: int = 1) -> Any:
        return tensor

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    set_device = synchronize = empty_cache = reset_peak_memory_stats = range_push = range_pop = nothing

    def plenty(self, *_: Any) -> int:
        return 1 << 40

    available_memory = total_memory = plenty

    def none(self, *_: Any) -> int:
        return 0

    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = none


for name in TENSOR_TYPES:
    setattr(FakeCuda, name, property(lambda self, name=name: getattr(torch, name)))
set_accelerator(FakeCuda())
torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
