"""Weights on their way out of the policy: cast, checked, fingerprinted and copied in a single pass.

A sync is bound by memory. So each tensor is read once, in blocks that stay in a core's cache for all four steps, and
parts of tensors are processed in parallel.
"""

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any

from workers.sync import fingerprint
from workers.sync.layout import NamedTensors, Shard, Slot, tensor_views
from workers.sync.parallel import parallel_map
from workers.sync.verify import tensor_fingerprint

BLOCK = 1 << 17  # elements: half a megabyte in float32


class OutgoingWeights:
    """The weights of one sync, bucket by bucket. A transport goes through them once, on every rank, in one of two ways:

    iter(outgoing)          whole tensors, the same on all ranks; with ZeRO 3 they are gathered bucket by bucket
    outgoing.shard_buckets  what this rank sends of each bucket: its own shards, without waiting for other ranks;
                            or on rank 0 whole tensors, and nothing on the others

    OutgoingWeights([[("model.norm.weight", tensor [896])]], [[("model.norm.weight", 0, tensor [896])]], torch.bfloat16)

    `fingerprints` collects, by tensor, the fingerprint of each part that was copied or cast, unless `verify` is off.
    Tensors take the dtype of the memory that they are copied to, else `dtype`, except those that `uncast` names.
    """

    def __init__(
        self,
        full_buckets: Iterable[NamedTensors],
        shard_buckets: Iterable[list[Shard]],
        dtype: Any,
        verify: bool = True,
        by_position: bool = False,
        uncast: Container[str] = (),
    ):
        self.full_buckets, self.shard_buckets = full_buckets, iter(shard_buckets)
        self.dtype, self.verify, self.by_position, self.uncast = dtype, verify, by_position, uncast
        self.fingerprints: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[NamedTensors]:
        return iter(self.full_buckets)

    # --- tensor by tensor ---------------------------------------------------------------------------------------------

    def cast_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields whole tensors in the engines' dtype, for transports that take them from the GPU."""
        for bucket in self:
            for name, tensor in bucket:
                yield name, self.cast_and_check(name, tensor, tensor.dtype if name in self.uncast else self.dtype)

    def cast_and_check(self, name: str, tensor: Any, dtype: Any) -> Any:
        whole = tensor.detach().to(dtype)
        require_finite(name, whole)
        if self.verify:
            self.record(name, tensor_fingerprint(whole, self.by_position))
        return whole

    # --- block by block, into host memory -----------------------------------------------------------------------------

    def copy_bucket(self, bucket: list[Shard], layout: list[Slot], memory: Any) -> None:
        """Copies shards into host memory. The layout may have more tensors than these."""
        targets = dict(tensor_views(memory, layout))
        # Fingerprints with positions are of whole tensors, and blocks on a GPU have no cache to stay in.
        if self.by_position or any(tensor.device.type != "cpu" for *_, tensor in bucket):
            for name, first, tensor in bucket:
                target = targets[name].view(-1)[first : first + tensor.numel()]
                target.copy_(self.cast_and_check(name, tensor, target.dtype).reshape(-1))
            return
        parts = [
            (name, part, target)
            for name, first, tensor in bucket
            for part, target in zip(
                fingerprint.split_for_hashing(tensor),
                fingerprint.split_for_hashing(targets[name].view(-1)[first : first + tensor.numel()]),
                strict=True,
            )
        ]
        for name, number in parallel_map(lambda part: (part[0], self.copy_part(*part)), parts):
            if self.verify:
                self.record(name, number)

    def copy_part(self, name: str, part: Any, target: Any) -> int:
        """Copies a part block by block. Returns its fingerprint."""
        running, sums = fingerprint.RunningHash(), []
        for (block, memory), target_block in zip(cast_blocks(part, target.dtype), target.split(BLOCK), strict=True):
            # The copy comes first: it reads and writes memory at the same time, and leaves the block in the cache.
            target_block.copy_(block)
            sums.append(block.sum())
            if self.verify:
                running.add(memory)
        if not all_finite(sums):  # the cheapest check; but a sum of finite numbers may be infinite too
            require_finite(name, part.to(target.dtype))
        return running.value()

    def record(self, name: str, number: int) -> None:
        self.fingerprints.setdefault(name, []).append(number)


def cast_blocks(part: Any, dtype: Any) -> Iterator[tuple[Any, memoryview]]:
    """Yields blocks of this dtype. Calls of torch block each other, so blocks without a cast share one."""
    blocks = part.split(BLOCK)
    if part.dtype != dtype:
        cast = (block.to(dtype) for block in blocks)
        yield from ((block, fingerprint.byte_view(block)) for block in cast)
    else:
        memory = fingerprint.byte_view(part)
        yield from ((block, memory[i * BLOCK : (i + 1) * BLOCK]) for i, block in enumerate(blocks))


def all_finite(numbers: list[Any]) -> bool:
    import torch

    return math.isfinite(torch.stack(numbers).sum().item())


def require_finite(name: str, tensor: Any) -> None:
    if not all(extreme.isfinite() for extreme in tensor.aminmax()):  # reads memory ten times as fast as isfinite
        raise FloatingPointError(f"{name} is not finite after the last update; no engine samples with it.")
