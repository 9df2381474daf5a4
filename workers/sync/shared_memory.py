"""Weights between processes of one host: written by the policy's ranks, and mapped by every engine.

rank 0:  invites to {"path": "/proc/123/fd/9", "buckets": [[(name, dtype, shape, offset), …], …]}
ranks:   map the path, copy bucket by bucket what each has; rank 0 all of it, where it has it or it was gathered
engine:  maps the path, loads each bucket as soon as all ranks have written it

The memory is as large as the model in the engines' dtype.
"""

from collections.abc import AsyncIterator
from typing import Any

from workers.sync.arrivals import PartRefs, wait_for_part
from workers.sync.host_memory import (
    BACKEND,
    CachedMapping,
    HostMemory,
    ManifestEntry,
    Message,
    plan_layout,
    split_into_buckets,
)
from workers.sync.outgoing import OutgoingWeights


class SharedMemorySender:
    needs_concurrent_receive = False
    replayable = True
    sends_shards = True

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.rank = rank

    def connection_info(self, manifest: list[ManifestEntry]) -> Message:
        self.layout, size = plan_layout(manifest)
        if self.rank:
            return {}
        self.own = HostMemory(size)
        where = {place[0]: place for place in self.layout}
        parts = [[where[name] for name, *_ in bucket] for bucket in split_into_buckets(manifest)]
        return {"parts": len(parts), "path": self.own.path, "buckets": parts}

    def connect(self, invitation: Message) -> None:
        self.memory = CachedMapping().open(invitation["path"]) if self.rank else self.own.bytes  # mapped there already

    def send(self, outgoing: OutgoingWeights, part: int) -> None:
        outgoing.copy_bucket(next(outgoing.shard_buckets), self.layout, self.memory)

    def finish_send(self) -> None:
        pass


class SharedMemoryReceiver:
    backend = BACKEND

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        self.path, self.buckets = invitation["path"], invitation["buckets"]
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        for refs, layout in zip(parts, self.buckets, strict=True):
            await wait_for_part(refs)
            yield {"path": self.path, "layout": layout}
