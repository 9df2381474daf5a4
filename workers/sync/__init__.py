"""How weights reach the engines: one file per transport, sender and receiver together.

    policy rank(s)              driver                      every engine
    invite()          ──▶  invitation            ──▶  Receiver.init_info → vLLM init_weight_transfer_engine
    connect()                (at the same time)
    begin()           ──▶  message               ──▶  start_weight_update, Receiver.updates → update_weights each,
    send(outgoing)           (at the same time)        finish_weight_update, reset_prefix_cache
    sent()            ◀──  all have it
                           fingerprints          ──▶  compares its own parameters, and lets samples out

The engine's side is vLLM's own weight-transfer interface for every transport: `nccl` and `ipc` are vLLM's backends, and
`workers/sync/host_memory.py` registers ours, which reads a mapped file of memory.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from workers.sync import cuda_ipc, nccl, object_store, shared_memory
from workers.sync.host_memory import Entry, Message
from workers.sync.outgoing import Outgoing

__all__ = ["RECEIVERS", "SENDERS", "Message", "Receiver", "Sender"]


class Sender(Protocol):
    """A policy rank's half. What `begin` says engines can follow while it sends, and must with `concurrent`; where that is
    nothing, they follow what `send` says. `lasting`: what it sent can be taken until it sends again, by an engine that was not
    there then. `by_shares`: each rank sends what it has of a tensor, and need not have it whole."""

    concurrent: bool
    lasting: bool
    by_shares: bool

    def __init__(self, rank: int, ranks: int, receivers: int): ...
    def invite(self, manifest: list[Entry]) -> Message: ...
    def connect(self) -> None: ...
    def begin(self) -> Message: ...
    def send(self, outgoing: Outgoing, begun: Message) -> Message: ...
    def sent(self) -> None: ...


class Receiver(Protocol):
    """An engine actor's half: translates messages into what vLLM's `backend` wants."""

    backend: str

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]: ...
    def updates(self, messages: list[Message]) -> AsyncIterator[dict[str, Any]]: ...


SENDERS: dict[str, type[Sender]] = {
    "shared_memory": shared_memory.Sender,
    "object_store": object_store.Sender,
    "nccl": nccl.Sender,
    "cuda_ipc": cuda_ipc.Sender,
}
RECEIVERS: dict[str, type[Receiver]] = {
    "shared_memory": shared_memory.Receiver,
    "object_store": object_store.Receiver,
    "nccl": nccl.Receiver,
    "cuda_ipc": cuda_ipc.Receiver,
}
