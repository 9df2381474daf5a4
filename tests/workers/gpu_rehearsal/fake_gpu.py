"""What transports for GPUs ask of CUDA, NCCL and CUDA IPC, without a GPU, in the process of a rank or of an engine.

Streams compute at once. NCCL's group is a store, and like NCCL it waits for ever for a peer that has died or
left. Memory that
is opened by CUDA IPC is a file: it holds what its owner had written when it last waited for the device.

A fault that is planted in a process happens once, at the next occasion:

    die     the process ends while it sends or receives
    late    it is three seconds late
    raise   CUDA reports an error
    astray  the process computes on another GPU than it should
    lose    a packet is not sent
    stale   the last packet of the same size is sent in place of one; or memory is not written
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
PLANTED: list[str] = []  # faults


def happens(fault: str) -> bool:
    """True once after the fault was planted."""
    if fault in PLANTED:
        PLANTED.remove(fault)
        return True
    return False


def die_or_be_late() -> None:
    if happens("die"):
        os._exit(1)
    if happens("late"):
        time.sleep(3)
    if happens("raise"):
        raise RuntimeError(f"CUDA error: out of memory, with {PLANTED.count('raise')} more to come")


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "Stream":
        return self


class Group:
    """Stands for vLLM's `PyNcclCommunicator`."""

    def __init__(self, group: Any, device: Any):
        self.group, self.rank, self.device = group, group.rank, torch.device("cpu")
        self.sent: dict[int, torch.Tensor] = {}  # by size
        group.barrier()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        try:
            die_or_be_late()
        except RuntimeError:
            self.group.store.set("left", "1")
            raise
        if self.group.store.check(["left"]):
            time.sleep(3600)
        if self.rank == src:
            self.send(tensor)
            return
        try:
            tensor.copy_(torch.from_numpy(self.group.broadcast_obj(None, src)))
        except Exception:
            time.sleep(3600)

    def send(self, tensor: torch.Tensor) -> None:
        if happens("lose"):
            return
        last = self.sent.get(len(tensor))
        stale = last is not None and not torch.equal(last, tensor) and happens("stale")
        self.group.broadcast_obj((last if stale else tensor).numpy(), self.rank)
        self.sent[len(tensor)] = tensor.clone()


def write_exported() -> None:
    """Brings the files up to date. Removes those of storages that were freed."""
    die_or_be_late()
    if all(file.exists() for _, file in EXPORTED) and happens("stale"):
        return
    for weak, file in list(EXPORTED):
        if weak.expired():
            file.unlink(missing_ok=True)  # a fault may have come before it was written
            EXPORTED.remove((weak, file))
            continue
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        with file.open("r+b" if file.exists() else "wb") as opened:  # others have mapped it
            opened.write(torch.tensor([], dtype=torch.uint8).set_(storage).numpy().data)


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
    die_or_be_late()
    file = Path(handle.decode())
    memory = torch.from_file(str(file), shared=True, size=file.stat().st_size // dtype.itemsize, dtype=dtype)
    return memory.as_strided(size, stride, offset)


def install(uuid: Any) -> None:
    """`uuid()` names the GPU of this process."""
    stream = Stream()
    torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    torch.cuda.set_stream = lambda _: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_: write_exported()  # type: ignore[assignment]
    torch.cuda.ipc_collect = write_exported
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment, return-value]
        uuid="gpu-astray" if happens("astray") else uuid()
    )
    torch.accelerator.current_device_index = lambda: 0
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[assignment, method-assign]
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine

    pynccl.PyNcclCommunicator = Group
    ipc_engine.rebuild_cuda_tensor = rebuild_cuda_tensor
