"""Weights within a GPU that a policy rank and an engine share: the engine opens the rank's memory and copies from it.

connection info:  {"in_place"}
every rank:       answers {"gpu": uuid, "tensors": [(name, dtype, shape), …], "handles"}
every engine:     picks the handles of its own GPU, through vLLM's `ipc` backend
every rank:       releases the memory once all engines have loaded

in place    weights that lie on the GPU whole and in the engines' dtype are read where they are: one bucket, a handle each
otherwise   a rank gathers, casts and copies bucket by bucket into one block of memory, which has one handle. It fills
            the block again when all engines have loaded the last bucket

Written from vLLM's sources. tests/gpu/results shows what has been run.
"""

import math
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

from workers.sync.layout import DTYPE_BYTES, ManifestEntry
from workers.sync.outgoing import OutgoingBucket
from workers.sync.transport import Message, PartRefs, wait_for_part


class CudaIpcSender:
    needs_concurrent_receive = False
    reuses_memory = True
    replayable = False
    sends_shards = False
    reads_in_place = True

    def __init__(self, rank: int, senders: int, receivers: int):
        self.exports = Exports()
        self.block: Any = None  # of memory; a sync allocates it, and frees it at the end

    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message:
        self.buckets, self.in_place = buckets, in_place
        return {"in_place": in_place}

    def connect(self, info: Message) -> None:
        pass

    def send(self, bucket: OutgoingBucket) -> Message:
        import torch

        if self.in_place:
            handles: Any = [self.exports.export(weight) for weight in bucket.cast()]
        else:
            handles = self.exports.export(self.fill_block(bucket))
        torch.cuda.synchronize()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return {"gpu": gpu, "tensors": bucket.entries, "handles": handles}

    def fill_block(self, bucket: OutgoingBucket) -> Any:
        """Copies a bucket into the block, without gaps, as vLLM reads it."""
        import torch

        if self.block is None:
            size = max(sum(map(entry_bytes, entries)) for entries in self.buckets)
            self.block = torch.empty(0, dtype=torch.uint8).cuda().new_empty(size)
        sizes = [entry_bytes(entry) for entry in bucket.entries]
        places = self.block[: sum(sizes)].split(sizes)
        targets = [
            place.view(getattr(torch, dtype)) for place, (_, dtype, _) in zip(places, bucket.entries, strict=True)
        ]
        bucket.copy_to(targets)
        return self.block

    def finish_send(self) -> None:
        import torch

        self.block = None
        self.exports.forget_freed()
        torch.cuda.ipc_collect()


class Exports:
    """What opens a tensor in another process, the arguments of torch's `rebuild_cuda_tensor`.

    torch keeps what belongs to an export until the tensor's storage is freed, which weights that are read in place never
    are. So these are exported at the first sync only, and a block of memory once in each sync.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}  # storage and arguments, by place and shape

    def export(self, tensor: Any) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in self.known or self.known[place][0].expired():
            self.known[place] = StorageWeakRef(tensor.untyped_storage()), reduce_tensor(tensor)[1]
        return self.known[place][1]

    def forget_freed(self) -> None:
        self.known = {place: kept for place, kept in self.known.items() if not kept[0].expired()}


class CudaIpcReceiver:
    backend = "ipc"

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo

        self.in_place, packed = info["in_place"], {"packed": not info["in_place"]}
        at_start = any(field.name == "packed" for field in fields(IPCWeightTransferInitInfo))
        self.for_each_part = {} if at_start else packed  # up to vLLM 0.27
        return packed if at_start else {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        for refs in parts:
            messages = await wait_for_part(refs)
            entries = messages[0]["tensors"]
            names, dtypes, shapes = zip(*entries, strict=True)
            update = {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)} | self.for_each_part
            if self.in_place:
                handles = [{m["gpu"]: m["handles"][i] for m in messages} for i in range(len(entries))]
                yield update | {"ipc_handles": handles}
            else:
                handle, sizes = {m["gpu"]: m["handles"] for m in messages}, [entry_bytes(entry) for entry in entries]
                yield update | {"ipc_handles": handle, "tensor_sizes": sizes}


def entry_bytes(entry: ManifestEntry) -> int:
    _, dtype, shape = entry
    return math.prod(shape) * DTYPE_BYTES[dtype]
