"""What all transports have in common: the two halves, and how an engine waits for what the ranks send, bucket by bucket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from workers.sync.layout import ManifestEntry
from workers.sync.outgoing import OutgoingBucket

PartRefs = list[Any]  # of one bucket: a reference to each rank's answer, by rank
Message = dict[str, Any]  # plain values only; each transport's docstring lists them


class Sender(Protocol):
    """A policy rank's half.

    `needs_concurrent_receive`: a rank can only send while the engines receive.
    `reuses_memory`: a rank sends a bucket only when all engines have loaded the one before.
    `replayable`: what was sent can be loaded until the next sync, also by an engine that was started later.
    `sends_shards`: ranks send their own shards of a tensor, or rank 0 all of it; else every rank sends whole tensors.
    `reads_in_place`: engines read weights where they lie, if they lie in the ranks' memory as they are sent (`in_place`).
    `senders`: the number of ranks that send, the first ones.
    """

    needs_concurrent_receive: bool
    reuses_memory: bool
    replayable: bool
    sends_shards: bool
    reads_in_place: bool

    def __init__(self, rank: int, senders: int, receivers: int): ...
    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message: ...
    def connect(self, info: Message) -> None: ...
    def send(self, bucket: OutgoingBucket) -> Any: ...
    def finish_send(self) -> None: ...


class Receiver(Protocol):
    """An engine actor's half: it translates the ranks' answers into what vLLM's `backend` expects.

    `in_process`: vLLM's worker runs in this process, so it can take any Python object.
    """

    backend: str

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]: ...
    def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]: ...


async def wait_for_part(refs: PartRefs) -> list[Any]:
    """Returns the ranks' answers once all of them have sent the bucket."""
    return list(await asyncio.gather(*refs))
