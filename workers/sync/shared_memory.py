"""Weights between processes of one host: the ranks write them to one block of memory, and every engine maps it.

connection info:  {"path": "/proc/123/fd/9", "buckets": [[(name, dtype, shape, offset), …], …]}, from rank 0
every rank:       maps the path and copies its shards, bucket by bucket; or rank 0 copies whole tensors
every engine:     maps the path and loads each bucket as soon as all ranks have written it

The memory is as large as the model in the engines' dtype.
"""

from collections.abc import AsyncIterator
from typing import Any

from workers.sync.host_memory import CachedMapping, HostMemory
from workers.sync.layout import ManifestEntry, plan_layout, shard_views
from workers.sync.outgoing import OutgoingBucket
from workers.sync.transport import Message, PartRefs, wait_for_part
from workers.sync.vllm_backend import BACKEND


class SharedMemorySender:
    needs_concurrent_receive = False
    reuses_memory = False
    replayable = True
    sends_shards = True
    reads_in_place = False

    def __init__(self, rank: int, senders: int, receivers: int):
        self.rank = rank

    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message:
        self.layout, size = plan_layout([entry for bucket in buckets for entry in bucket])
        if self.rank:
            return {}
        self.owned = HostMemory(size)
        slots = {slot[0]: slot for slot in self.layout}
        return {"path": self.owned.path, "buckets": [[slots[name] for name, *_ in bucket] for bucket in buckets]}

    def connect(self, info: Message) -> None:
        self.memory = (
            CachedMapping().open(info["path"]) if self.rank else self.owned.bytes
        )  # rank 0 has mapped it already

    def send(self, bucket: OutgoingBucket) -> None:
        bucket.copy_to(shard_views(self.memory, self.layout, bucket.shards))

    def finish_send(self) -> None:
        pass


class SharedMemoryReceiver:
    backend = BACKEND

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        self.path, self.buckets = info["path"], info["buckets"]
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        for refs, layout in zip(parts, self.buckets, strict=True):
            await wait_for_part(refs)
            yield {"path": self.path, "layout": layout}
