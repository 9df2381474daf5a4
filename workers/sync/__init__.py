"""How weights reach the engines: one file per transport, sender and receiver together.

    policy rank(s)              driver                      every engine
    invite()          ──▶  invitation            ──▶  Receiver.init_info → vLLM init_weight_transfer_engine
    connect(invitation)      (at the same time)
    send(…, part 0)   ──▶  references            ──▶  start_weight_update, Receiver.updates → update_weights each,
    send(…, part 1)          (at the same time)        finish_weight_update, reset_prefix_cache
    sent()            ◀──  all have it
                           fingerprints          ──▶  compares its own parameters, and lets samples out

The driver asks for all parts at once, and gives the engines references to the answers: these wait for a part until every rank
has answered, and what the answers hold goes from rank to engine.

The engine's side is vLLM's own weight-transfer interface for every transport: `nccl` and `ipc` are vLLM's backends, and
`workers/sync/host_memory.py` registers ours, which reads a mapped file of memory.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from workers.sync import cuda_ipc, nccl, object_store, shared_memory
from workers.sync.arrivals import PartRefs
from workers.sync.host_memory import ManifestEntry, Message
from workers.sync.outgoing import OutgoingWeights

__all__ = ["RECEIVERS", "SENDERS", "Message", "Receiver", "Sender"]


class Sender(Protocol):
    """A policy rank's half. Rank 0's invitation says in how many `parts` weights are sent. `concurrent`: a rank cannot send unless
    engines take at the same time. `lasting`: what it sent can be taken until it sends again, by an engine that was not there
    then. `by_shares`: each rank can send what it has of a tensor, and need not have it whole."""

    needs_concurrent_receive: bool
    replayable: bool
    sends_shards: bool

    def __init__(self, rank: int, ranks: int, receivers: int): ...
    def connection_info(self, manifest: list[ManifestEntry]) -> Message: ...
    def connect(self, invitation: Message) -> None: ...
    def send(self, outgoing: OutgoingWeights, part: int) -> Any: ...
    def finish_send(self) -> None: ...


class Receiver(Protocol):
    """An engine actor's half: translates what the ranks say into what vLLM's `backend` wants.

    `inside`: vLLM's worker is in this process, and takes any object of Python's.
    """

    backend: str

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]: ...
    def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]: ...


SENDERS: dict[str, type[Sender]] = {
    "shared_memory": shared_memory.SharedMemorySender,
    "object_store": object_store.ObjectStoreSender,
    "nccl": nccl.NcclSender,
    "cuda_ipc": cuda_ipc.CudaIpcSender,
}
RECEIVERS: dict[str, type[Receiver]] = {
    "shared_memory": shared_memory.SharedMemoryReceiver,
    "object_store": object_store.ObjectStoreReceiver,
    "nccl": nccl.NcclReceiver,
    "cuda_ipc": cuda_ipc.CudaIpcReceiver,
}
