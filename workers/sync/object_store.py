"""Weights between hosts through Ray's object store, which moves them once per host.

rank 0:        invites to {"layouts": [[(name, dtype, shape, offset), …], …], "size": bytes of the largest bucket}
every rank:    answers, for each bucket, with what it sends of it: (bytes, [(to, from, count), …]); where rank 0 sends all, others nothing
engine actor:  each bucket: fetch what ranks have of it, and hand vLLM's worker the bytes where they lie, if one rank had all of them
               and the worker is this process; else put them together in memory of this host, and hand it the path

The object store of each host holds the model once, in the engines' dtype; every rank holds what it sends of a bucket more, and every
engine that puts them together a bucket.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from workers.sync.arrivals import PartRefs, wait_for_part
from workers.sync.host_memory import (
    BACKEND,
    DTYPE_BYTES,
    HostMemory,
    ManifestEntry,
    Message,
    plan_layout,
    split_into_buckets,
)
from workers.sync.outgoing import OutgoingWeights

Piece = tuple[np.ndarray[Any, Any], list[tuple[int, int, int]]]  # bytes, and which of them go where


class ObjectStoreSender:
    needs_concurrent_receive = False
    replayable = True
    sends_shards = True

    def __init__(self, rank: int, ranks: int, receivers: int):
        import torch

        self.memory = torch.empty(0, dtype=torch.uint8)

    def connection_info(self, manifest: list[ManifestEntry]) -> Message:
        self.layouts, sizes = zip(*(plan_layout(bucket) for bucket in split_into_buckets(manifest)), strict=True)
        return {"parts": len(sizes), "layouts": self.layouts, "size": max(sizes)}

    def connect(self, invitation: Message) -> None:
        pass

    def send(self, outgoing: OutgoingWeights, part: int) -> Piece:
        shares = next(outgoing.shard_buckets)
        of = {name: (dtype, offset) for name, dtype, _, offset in self.layouts[part]}
        own, size = plan_layout([(name, of[name][0], [elements.numel()]) for name, _, elements in shares])
        if size > len(self.memory):  # kept: the first look at each page is dear
            self.memory = self.memory.new_empty(size)
        outgoing.copy_bucket([(name, 0, elements) for name, _, elements in shares], own, self.memory)
        moves = []
        for (name, first, elements), (_, dtype, _, at) in zip(shares, own, strict=True):
            moves.append((of[name][1] + first * DTYPE_BYTES[dtype], at, elements.numel() * DTYPE_BYTES[dtype]))
        return self.memory[:size].numpy(), moves

    def finish_send(self) -> None:
        pass


class ObjectStoreReceiver:
    backend = BACKEND

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        self.layouts, self.size = invitation["layouts"], invitation["size"]
        self.inside = inside
        self.memory: HostMemory | None = None
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        for refs, layout in zip(parts, self.layouts, strict=True):
            pieces: list[Piece] = [piece for piece in await wait_for_part(refs) if piece[1]]
            if self.inside and len(pieces) == 1 and all(to == at for to, at, _ in pieces[0][1]):
                yield {"held": pieces[0][0], "layout": layout}
            else:
                yield {"path": self.join_pieces(pieces), "layout": layout}

    def join_pieces(self, pieces: list[Piece]) -> str:
        self.memory = self.memory or HostMemory(self.size)
        memory = self.memory.bytes.numpy()
        for flat, moves in pieces:
            for to, at, count in moves:
                memory[to : to + count] = flat[at : at + count]
        return self.memory.path
