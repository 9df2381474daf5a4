"""Weights between hosts through Ray's object store, which moves them once per host.

connection info:  {"layouts": [[(name, dtype, shape, offset), …], …], "size": bytes of the largest bucket}
every rank:       answers each bucket with its shards: (bytes, [(to, from, count), …]);
                  or rank 0 with whole tensors, and the others with nothing
every engine:     fetches each bucket. If one rank sent all of it, and vLLM's worker is in this process, the worker gets
                  the bytes where they lie. Otherwise they are joined in memory of this host, and it gets the path

Memory: the object store of each host holds the model once, in the engines' dtype. In addition, every rank holds its
share of one bucket, and every engine that joins pieces holds one bucket.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from workers.sync.host_memory import HostMemory
from workers.sync.layout import DTYPE_BYTES, ManifestEntry, plan_layout, tensor_views
from workers.sync.outgoing import OutgoingBucket
from workers.sync.transport import Message, PartRefs, wait_for_part
from workers.sync.vllm_backend import BACKEND

Move = tuple[int, int, int]  # to, from, count: offsets in the bucket and in the bytes of the rank, in bytes
Pieces = tuple[np.ndarray[Any, Any], list[Move]]  # what one rank sends of a bucket


class ObjectStoreSender:
    needs_concurrent_receive = False
    reuses_memory = False
    replayable = True
    sends_shards = True
    reads_in_place = False

    def __init__(self, rank: int, senders: int, receivers: int):
        import torch

        self.memory = torch.empty(0, dtype=torch.uint8)

    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message:
        self.layouts, sizes = zip(*(plan_layout(bucket) for bucket in buckets), strict=True)
        return {"layouts": self.layouts, "size": max(sizes)}

    def connect(self, info: Message) -> None:
        pass

    def send(self, bucket: OutgoingBucket) -> Pieces:
        shards, slots = bucket.shards, {name: (dtype, offset) for name, dtype, _, offset in self.layouts[bucket.number]}
        local, size = plan_layout([(name, slots[name][0], [elements.numel()]) for name, _, elements in shards])
        if size > len(self.memory):  # it is kept, because the first access to each page is slow
            self.memory = self.memory.new_empty(size)
        bucket.copy_to([copy for _, copy in tensor_views(self.memory, local)])
        moves = []
        for (name, first, elements), (_, dtype, _, offset) in zip(shards, local, strict=True):
            to = slots[name][1] + first * DTYPE_BYTES[dtype]
            moves.append((to, offset, elements.numel() * DTYPE_BYTES[dtype]))
        return self.memory[:size].numpy(), moves

    def finish_send(self) -> None:
        pass


class ObjectStoreReceiver:
    backend = BACKEND

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        self.layouts, self.size = info["layouts"], info["size"]
        self.in_process = in_process
        self.memory: HostMemory | None = None
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        for refs, layout in zip(parts, self.layouts, strict=True):
            pieces: list[Pieces] = [piece for piece in await wait_for_part(refs) if piece[1]]
            if self.in_process and len(pieces) == 1 and all(to == offset for to, offset, _ in pieces[0][1]):
                yield {"array": pieces[0][0], "layout": layout}
            else:
                yield {"path": self.join_pieces(pieces), "layout": layout}

    def join_pieces(self, pieces: list[Pieces]) -> str:
        """Puts a bucket together in memory of this host. Returns the path of that memory."""
        self.memory = self.memory or HostMemory(self.size)
        memory = self.memory.bytes.numpy()
        for flat, moves in pieces:
            for to, offset, count in moves:
                memory[to : to + count] = flat[offset : offset + count]
        return self.memory.path
