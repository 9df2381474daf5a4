"""Weights between hosts through Ray's object store, which moves them once per host.

rank 0:        invites to {"layouts": [[(name, dtype, shape, offset), …], …], "size": bytes of the largest bucket}
every rank:    answers, for each bucket, with what it sends of it: (bytes, [(to, from, count), …]); where rank 0 sends all, others nothing
engine actor:  each bucket: fetch what ranks have of it, and hand vLLM's worker the bytes where they lie, if one rank had all of them
               and the worker is this process; else put them together in memory of this host, and hand it the path

The object store of each host holds the model once, in the engines' dtype; every rank holds what it sends of a bucket more, and every
engine that puts them together a bucket.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from workers.sync.arrivals import Refs, arrived
from workers.sync.host_memory import BACKEND, WIDTH, Entry, HostMemory, Message, buckets, places
from workers.sync.outgoing import Outgoing

Piece = tuple[np.ndarray[Any, Any], list[tuple[int, int, int]]]  # bytes, and which of them go where


class Sender:
    concurrent = False
    lasting = True
    by_shares = True

    def __init__(self, rank: int, ranks: int, receivers: int):
        import torch

        self.memory = torch.empty(0, dtype=torch.uint8)

    def invite(self, manifest: list[Entry]) -> Message:
        self.layouts, sizes = zip(*(places(bucket) for bucket in buckets(manifest)), strict=True)
        return {"parts": len(sizes), "layouts": self.layouts, "size": max(sizes)}

    def connect(self, invitation: Message) -> None:
        pass

    def send(self, outgoing: Outgoing, part: int) -> Piece:
        shares = next(outgoing.shares)
        of = {name: (dtype, offset) for name, dtype, _, offset in self.layouts[part]}
        own, size = places([(name, of[name][0], [elements.numel()]) for name, _, elements in shares])
        if size > len(self.memory):  # kept: the first look at each page is dear
            self.memory = self.memory.new_empty(size)
        outgoing.copy([(name, 0, elements) for name, _, elements in shares], own, self.memory)
        moves = []
        for (name, first, elements), (_, dtype, _, at) in zip(shares, own, strict=True):
            moves.append((of[name][1] + first * WIDTH[dtype], at, elements.numel() * WIDTH[dtype]))
        return self.memory[:size].numpy(), moves

    def sent(self) -> None:
        pass


class Receiver:
    backend = BACKEND

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        self.layouts, self.size = invitation["layouts"], invitation["size"]
        self.inside = inside
        self.memory: HostMemory | None = None
        return {}

    async def updates(self, parts: list[Refs]) -> AsyncIterator[dict[str, Any]]:
        for refs, layout in zip(parts, self.layouts, strict=True):
            pieces: list[Piece] = [piece for piece in await arrived(refs) if piece[1]]
            if self.inside and len(pieces) == 1 and all(to == at for to, at, _ in pieces[0][1]):
                yield {"held": pieces[0][0], "layout": layout}
            else:
                yield {"path": self.together(pieces), "layout": layout}

    def together(self, pieces: list[Piece]) -> str:
        self.memory = self.memory or HostMemory(self.size)
        memory = self.memory.bytes.numpy()
        for flat, moves in pieces:
            for to, at, count in moves:
                memory[to : to + count] = flat[at : at + count]
        return self.memory.path
