"""Weights between hosts through Ray's object store, which moves them once per host.

rank 0:  each bucket ──▶ ray.put ──▶ {"buckets": [([ObjectRef], layout), …], "size": bytes of the largest}
engine actor:  each bucket: fetch, copy into memory of this host, hand vLLM's worker the path, as in shared_memory

The object store of each host holds the model once, in the engines' dtype; rank 0 and every engine hold one bucket more.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from workers.sync.host_memory import BACKEND, Entry, HostMemory, Message, places
from workers.sync.outgoing import Outgoing


class Sender:
    concurrent = False
    lasting = True

    def __init__(self, rank: int, receivers: int):
        self.rank = rank

    def invite(self, manifest: list[Entry]) -> Message:
        self.entries = {entry[0]: entry for entry in manifest}
        return {"manifest": manifest}

    def connect(self) -> None:
        pass

    def send(self, outgoing: Outgoing) -> Message:
        import torch

        sent, largest = [], 0
        for bucket in outgoing:
            if self.rank == 0:
                layout, size = places([self.entries[name] for name, _ in bucket])
                flat = torch.empty(size, dtype=torch.uint8)
                outgoing.copy(bucket, layout, flat)
                # In a list: a bare reference would be resolved by Ray into every call's arguments.
                sent.append(([ray.put(flat.numpy())], layout))
                largest = max(largest, size)
        return {} if self.rank else {"buckets": sent, "size": largest}

    def sent(self) -> None:
        pass


class Receiver:
    backend = BACKEND

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]:
        return {}

    def updates(self, messages: list[Message]) -> Iterator[dict[str, Any]]:
        if self.memory is None:
            self.memory = HostMemory(messages[0]["size"])
        for [ref], layout in messages[0]["buckets"]:
            flat: np.ndarray[Any, Any] = ray.get(ref)
            self.memory.bytes.numpy()[: len(flat)] = flat
            yield {"path": self.memory.path, "layout": layout}
