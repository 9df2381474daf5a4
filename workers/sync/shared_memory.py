"""Weights between processes of one host: written by the policy's ranks, each what it has, and mapped by every engine.

rank 0:  begin ──▶ {"path": "/proc/123/fd/9", "ranks": 2, "buckets": [[(name, dtype, shape, offset), …], …]}
ranks:   map the path, copy bucket by bucket, and say at its end how many they have written
engine:  map the path, load each bucket as soon as all ranks have written it
rank 0:  may begin again once all engines have answered

The memory is as large as the model in the engines' dtype.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from workers.sync.host_memory import ALIGN, BACKEND, Entry, HostMemory, Mapping, Message, buckets, places
from workers.sync.outgoing import Outgoing

LOOK_S = 0.001  # between two looks whether a bucket is there


class Sender:
    concurrent = False
    lasting = True
    by_shares = True

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.rank, self.ranks, self.mapping = rank, ranks, Mapping()

    def invite(self, manifest: list[Entry]) -> Message:
        self.layout, size = places(manifest)
        if self.rank == 0:
            self.memory = HostMemory(size + ALIGN * self.ranks)
            where = {place[0]: place for place in self.layout}
            parts = [[where[name] for name, *_ in bucket] for bucket in buckets(manifest)]
            self.message = {"path": self.memory.path, "ranks": self.ranks, "buckets": parts}
        return {"manifest": manifest}

    def connect(self) -> None:
        pass

    def begin(self) -> Message:
        if self.rank:
            return {}
        written(self.memory.bytes, self.ranks)[:] = 0
        return self.message

    def send(self, outgoing: Outgoing, begun: Message) -> Message:
        memory = self.mapping.of(begun["path"]) if self.rank else self.memory.bytes  # mapped there already
        for number, bucket in enumerate(outgoing.shares, 1):
            outgoing.copy(bucket, self.layout, memory)
            written(memory, self.ranks)[self.rank] = number
        return {}

    def sent(self) -> None:
        pass


class Receiver:
    backend = BACKEND

    def __init__(self) -> None:
        self.mapping = Mapping()

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]:
        return {}

    async def updates(self, messages: list[Message]) -> AsyncIterator[dict[str, Any]]:
        path, ranks = messages[0]["path"], messages[0]["ranks"]
        there = written(self.mapping.of(path), ranks)
        for number, layout in enumerate(messages[0]["buckets"], 1):
            while there.min() < number:
                await asyncio.sleep(LOOK_S)
            yield {"path": path, "layout": layout}


def written(memory: Any, ranks: int) -> Any:
    """How many buckets each rank has written."""
    import torch

    return memory[-ALIGN * ranks :].view(torch.int64).numpy()[:: ALIGN // 8]
