"""Weights between hosts through Ray's object store, which moves them once per host.

every rank:    what it has of each bucket ──▶ ray.put ──▶ {"layouts": [[(name, dtype, shape, offset), …], …],
               "size": bytes of the largest bucket, "buckets": [([ObjectRef], [(to, from, bytes), …]), …]}
engine actor:  each bucket: fetch what ranks have of it, put it together in memory of this host, hand vLLM's worker the path

The object store of each host holds the model once, in the engines' dtype; every rank holds its part of a bucket more, and every
engine a bucket.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray

from workers.sync.host_memory import BACKEND, WIDTH, Entry, HostMemory, Message, Place, buckets, places
from workers.sync.outgoing import Outgoing, Share


class Sender:
    concurrent = False
    lasting = True
    by_shares = True

    def __init__(self, rank: int, ranks: int, receivers: int):
        pass

    def invite(self, manifest: list[Entry]) -> Message:
        self.layouts, sizes = zip(*(places(bucket) for bucket in buckets(manifest)), strict=True)
        self.size = max(sizes)
        return {"manifest": manifest}

    def connect(self) -> None:
        pass

    def begin(self) -> Message:
        return {}

    def send(self, outgoing: Outgoing, begun: Message) -> Message:
        sent = [put(outgoing, shares, layout) for shares, layout in zip(outgoing.shares, self.layouts, strict=True)]
        return {"layouts": self.layouts, "size": self.size, "buckets": sent}

    def sent(self) -> None:
        pass


def put(outgoing: Outgoing, shares: list[Share], layout: list[Place]) -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Where the bytes are, and which of them go where. In a list: a bare reference would be resolved by Ray into every call's
    arguments."""
    import torch

    if not shares:
        return [], []
    of = {name: (dtype, offset) for name, dtype, _, offset in layout}
    own, size = places([(name, of[name][0], [elements.numel()]) for name, _, elements in shares])
    flat = torch.empty(size, dtype=torch.uint8)
    outgoing.copy([(name, 0, elements) for name, _, elements in shares], own, flat)
    moves = []
    for (name, first, elements), (_, dtype, _, at) in zip(shares, own, strict=True):
        moves.append((of[name][1] + first * WIDTH[dtype], at, elements.numel() * WIDTH[dtype]))
    return [ray.put(flat.numpy())], moves


class Receiver:
    backend = BACKEND

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int) -> dict[str, Any]:
        return {}

    async def updates(self, messages: list[Message]) -> AsyncIterator[dict[str, Any]]:
        if self.memory is None:
            self.memory = HostMemory(messages[0]["size"])
        memory = self.memory.bytes.numpy()
        for layout, *of_ranks in zip(messages[0]["layouts"], *(m["buckets"] for m in messages), strict=True):
            for refs, moves in of_ranks:
                for ref in refs:
                    flat: np.ndarray[Any, Any] = ray.get(ref)
                    for to, at, count in moves:
                        memory[to : to + count] = flat[at : at + count]
            yield {"path": self.memory.path, "layout": layout}
