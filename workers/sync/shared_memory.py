"""Weights between processes of one host: written once by policy rank 0, mapped by every engine.

rank 0:  copy bucket by bucket ──▶ {"path": "/proc/123/fd/9", "layout": [(name, dtype, shape, offset), …]}
engine:  map the path, load from it
rank 0:  may overwrite the memory once all engines have answered

The memory is as large as the model in the engines' dtype.
"""

from collections.abc import Iterator
from typing import Any

from workers.sync.host_memory import BACKEND, Entry, HostMemory, Message, places
from workers.sync.outgoing import Outgoing


class Sender:
    concurrent = False
    lasting = True

    def __init__(self, rank: int, receivers: int):
        self.rank = rank

    def invite(self, manifest: list[Entry]) -> Message:
        self.layout, size = places(manifest)
        if self.rank == 0:
            self.memory = HostMemory(size)
        return {"manifest": manifest}

    def connect(self) -> None:
        pass

    def send(self, outgoing: Outgoing) -> Message:
        for bucket in outgoing:
            if self.rank == 0:
                outgoing.copy(bucket, self.layout, self.memory.bytes)
        return {} if self.rank else {"path": self.memory.path, "layout": self.layout}

    def sent(self) -> None:
        pass


class Receiver:
    backend = BACKEND

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]:
        return {}

    def updates(self, messages: list[Message]) -> Iterator[dict[str, Any]]:
        yield messages[0]
