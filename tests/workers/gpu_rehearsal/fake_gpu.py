"""What transports for GPUs ask of CUDA, NCCL and CUDA IPC, without a GPU, in the process of a rank or of an engine.

Streams compute at once. NCCL's group is a store, and like NCCL it waits for ever for a peer that has died. Memory that
is opened by CUDA IPC is a file: it holds what its owner had written when it last waited for the device.
"""

import contextlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

FOLDER = Path(tempfile.gettempdir()) / f"rlsys-fake-gpu-{os.getuid()}"
EXPORTED: list[tuple[Any, Path]] = []  # storages of this process and their files
NUMBERS = itertools.count()
DIE_IN_BROADCAST: list[bool] = []  # any entry: the next broadcast from here ends the process


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Group:
    """Stands for vLLM's `PyNcclCommunicator`."""

    def __init__(self, group: Any, device: Any):
        self.group, self.rank, self.peers = group, group.rank, group.world_size
        group.barrier()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.rank == src:
            if DIE_IN_BROADCAST:
                os._exit(1)
            self.group.broadcast_obj(tensor.numpy(), src)
            return
        try:
            tensor.copy_(torch.from_numpy(self.group.broadcast_obj(None, src)))
        except Exception:
            time.sleep(3600)


def write_exported() -> None:
    """Brings the files up to date. Removes those of storages that were freed."""
    for weak, file in list(EXPORTED):
        if weak.expired():
            file.unlink()
            EXPORTED.remove((weak, file))
            continue
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        file.write_bytes(bytes(torch.tensor([], dtype=torch.uint8).set_(storage).numpy()))


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """As torch's for CUDA; a file's name is the handle."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{os.getpid()}-{next(NUMBERS)}"
    EXPORTED.append((reductions.StorageWeakRef(tensor.untyped_storage()), file))
    place = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), torch.UntypedStorage, tensor.dtype)
    return None, (*place, 0, str(file).encode(), 0, 0, False, b"", 0, b"", True)


def rebuild_cuda_tensor(
    kind: type,
    size: Any,
    stride: Any,
    offset: int,
    storage: type,
    dtype: torch.dtype,
    device: Any,
    handle: bytes,
    *_: Any,
) -> torch.Tensor:
    content = torch.frombuffer(bytearray(Path(handle.decode()).read_bytes()), dtype=dtype)
    return content.as_strided(size, stride, offset)


def install(uuid: Any) -> None:
    """`uuid()` names the GPU of this process."""
    stream = Stream()
    torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    torch.cuda.set_stream = lambda _: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_: write_exported()  # type: ignore[assignment]
    torch.cuda.ipc_collect = write_exported
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=uuid())  # type: ignore[assignment, return-value]
    torch.accelerator.current_device_index = lambda: 0
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[assignment, method-assign]
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine

    pynccl.PyNcclCommunicator = Group
    ipc_engine.rebuild_cuda_tensor = rebuild_cuda_tensor
