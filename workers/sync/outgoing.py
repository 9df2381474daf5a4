"""Weights on their way out of the policy: cast, looked at, fingerprinted and copied in one go.

Memory is what a sync waits for. So each tensor is read once, in blocks that stay in the cache of a core for all that is done
with them, and parts of tensors are copied side by side.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from workers.sync import fingerprint
from workers.sync.host_memory import NamedTensors, Slot, tensor_views
from workers.sync.parallel import parallel_map
from workers.sync.verify import tensor_fingerprint

BLOCK = 1 << 17  # elements: half a megabyte in float32


Shard = tuple[str, int, Any]  # name, number of its first element in the whole tensor, elements


class OutgoingWeights:
    """What the policy has, bucket by bucket; a transport goes through it once, on every rank, in one of two ways:

    iter(outgoing)      whole tensors, the same on all ranks: with ZeRO 3 they are gathered from all, bucket by bucket
    outgoing.shares     an iterator over what this rank is to send of each bucket: what it has, and then nobody waits for anybody; or
                        on rank 0 whole tensors, and on the others nothing

    `Outgoing([[("model.norm.weight", tensor [896])]], [[("model.norm.weight", 0, tensor [896])]], torch.bfloat16)`
    `prints` will hold, in `dtype`, the fingerprint of each part of what was copied or cast, by tensor, unless `verify` is off.
    """

    def __init__(
        self,
        wholes: Iterable[NamedTensors],
        shares: Iterable[list[Shard]],
        dtype: Any,
        verify: bool = True,
        by_place: bool = False,
    ):
        self.full_buckets, self.shard_buckets = wholes, iter(shares)
        self.dtype, self.verify, self.by_place = dtype, verify, by_place
        self.fingerprints: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[NamedTensors]:
        return iter(self.full_buckets)

    def copy_bucket(self, bucket: list[Shard], layout: list[Slot], memory: Any) -> None:
        """Into memory of this host, whose layout may be of more tensors than these."""
        places = dict(tensor_views(memory, layout))
        if self.by_place or any(tensor.device.type != "cpu" for *_, tensor in bucket):  # see `Chart.answer`
            for name, first, tensor in bucket:
                place = places[name].view(-1)[first : first + tensor.numel()]
                place.copy_(self.cast_and_check(name, tensor).reshape(-1))
            return
        parts = [
            (name, part, place)
            for name, first, tensor in bucket
            for part, place in zip(
                fingerprint.split_for_hashing(tensor),
                fingerprint.split_for_hashing(places[name].view(-1)[first : first + tensor.numel()]),
                strict=True,
            )
        ]
        for name, number in parallel_map(lambda part: (part[0], self.copy_part(*part)), parts):
            self.record(name, number)

    def record(self, name: str, number: int) -> None:
        if self.verify:
            self.fingerprints.setdefault(name, []).append(number)

    def copy_part(self, name: str, part: Any, place: Any) -> int:
        running, sums = fingerprint.RunningHash(), []
        for (block, memory), target in zip(self.blocks(part), place.split(BLOCK), strict=True):
            # First: it reads and writes memory at the same time, and the rest finds the block in the cache.
            target.copy_(block)
            sums.append(block.sum())
            if self.verify:
                running.add(memory)
        if not all_finite(sums):  # the cheapest look; a sum of finite numbers may be infinite too
            require_finite(name, part.to(self.dtype))
        return running.value()

    def blocks(self, part: Any) -> Iterator[tuple[Any, memoryview]]:
        """As they leave. Threads that call torch wait for each other, so it is asked once for what need not be cast."""
        blocks = part.split(BLOCK)
        if part.dtype != self.dtype:
            cast = (block.to(self.dtype) for block in blocks)
            yield from ((block, fingerprint.byte_view(block)) for block in cast)
        else:
            memory = fingerprint.byte_view(part)
            yield from ((block, memory[i * BLOCK : (i + 1) * BLOCK]) for i, block in enumerate(blocks))

    def cast_tensors(self) -> Iterator[tuple[str, Any]]:
        """Tensor by tensor, for transports that take them from the GPU."""
        for bucket in self:
            for name, tensor in bucket:
                yield name, self.cast_and_check(name, tensor)

    def cast_and_check(self, name: str, tensor: Any) -> Any:
        whole = tensor.detach().to(self.dtype)
        require_finite(name, whole)
        if self.verify:
            self.record(name, tensor_fingerprint(whole, self.by_place))
        return whole


def all_finite(numbers: list[Any]) -> bool:
    import torch

    return math.isfinite(torch.stack(numbers).sum().item())


def require_finite(name: str, tensor: Any) -> None:
    if not all(extreme.isfinite() for extreme in tensor.aminmax()):  # reads memory ten times as fast as isfinite
        raise FloatingPointError(f"{name} is not finite after the last update; no engine samples with it.")
