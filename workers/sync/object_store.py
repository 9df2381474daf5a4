"""Weights between hosts through Ray's object store, which moves them once per host.

rank 0:  flat bytes ──▶ ray.put ──▶ {"bytes": [ObjectRef], "size": …, "layout": …}
engine actor:  fetch, copy into memory of this host, hand vLLM's worker the path, as in shared_memory
"""

from typing import Any

import numpy as np
import ray

from workers.sync.host_memory import BACKEND, HostMemory, Message, Weights, places, view


class Sender:
    concurrent = False
    lasting = True

    def __init__(self, rank: int, receivers: int):
        self.rank = rank

    def invite(self, manifest: list[tuple[str, str, list[int]]]) -> Message:
        self.layout, self.size = places(manifest)
        return {"manifest": manifest}

    def connect(self) -> None:
        pass

    def send(self, tensors: Weights) -> Message:
        import torch

        if self.rank:
            for _ in tensors:  # takes part in gathering ZeRO-3 partitions
                pass
            return {}
        flat = torch.zeros(self.size, dtype=torch.uint8)
        for (_, dtype, shape, offset), (_, tensor) in zip(self.layout, tensors, strict=True):
            view(flat, dtype, shape, offset).copy_(tensor)
        # In a list: a bare reference would be resolved by Ray into every call's arguments.
        return {"bytes": [ray.put(flat.numpy())], "size": self.size, "layout": self.layout}

    def sent(self) -> None:
        pass


class Receiver:
    backend = BACKEND

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]:
        return {}

    def update_info(self, messages: list[Message]) -> dict[str, Any]:
        message = messages[0]
        if self.memory is None:
            self.memory = HostMemory(message["size"])
        flat: np.ndarray[Any, Any] = ray.get(message["bytes"][0])
        self.memory.bytes.numpy()[:] = flat
        return {"path": self.memory.path, "size": message["size"], "layout": message["layout"]}
