"""Weights on their way out of the policy: cast, checked, fingerprinted and copied in a single pass.

A sync is bound by memory. So each tensor is read once: on CPU in blocks that stay in a core's cache for all four steps,
with parts of tensors in parallel, and on a GPU by one kernel.
"""

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any

from workers.sync import fingerprint
from workers.sync.layout import NamedTensors, Shard
from workers.sync.parallel import parallel_map

BLOCK = 1 << 17  # elements: half a megabyte in float32


class OutgoingWeights:
    """The weights of one sync, bucket by bucket. A transport goes through them once, on every rank, in one of two ways:

    outgoing.full_buckets   whole tensors, the same on all ranks; with ZeRO 3 they are gathered bucket by bucket
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
        self.full_buckets, self.shard_buckets = iter(full_buckets), iter(shard_buckets)
        self.dtype, self.verify, self.by_position, self.uncast = dtype, verify, by_position, uncast
        self.fingerprints: dict[str, list[int]] = {}

    # --- tensor by tensor ---------------------------------------------------------------------------------------------

    def cast_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields whole tensors in the engines' dtype."""
        for bucket in self.full_buckets:
            for name, tensor in bucket:
                yield name, self.cast_and_check(name, tensor, tensor.dtype if name in self.uncast else self.dtype)

    def cast_and_check(self, name: str, tensor: Any, dtype: Any, first: int = 0) -> Any:
        """`first`: where a shard begins in the whole tensor."""
        cast = tensor.detach().to(dtype)
        if fingerprint.has_kernel(cast):
            self.pass_on_gpu([(name, first, cast)], [None])
            return cast
        require_finite(name, cast)
        if self.verify:
            self.record(name, self.shard_fingerprint(cast, first))
        return cast

    def shard_fingerprint(self, tensor: Any, first: int) -> int:
        if self.by_position:
            flat = tensor.reshape(-1)
            return fingerprint.hash_with_positions(flat, flat.shape, (first, 0))
        return fingerprint.hash_bytes(tensor)

    # --- into a bucket ------------------------------------------------------------------------------------------------

    def copy_bucket(self, bucket: list[Shard], targets: list[Any]) -> None:
        """Copies shards to flat tensors of the same sizes, in host memory or on the GPU."""
        if any(map(fingerprint.has_kernel, targets)):
            self.pass_on_gpu(
                [(name, first, tensor.to(t.device)) for (name, first, tensor), t in zip(bucket, targets, strict=True)],
                targets,
            )
            return
        # What hashes blocks in a core's cache hashes bytes only, and blocks on a GPU have no cache to stay in.
        if self.by_position or any(tensor.device.type != "cpu" for *_, tensor in bucket):
            for (name, first, tensor), target in zip(bucket, targets, strict=True):
                target.copy_(self.cast_and_check(name, tensor, target.dtype, first).reshape(-1))
            return
        parts = [
            (name, part, target_part)
            for (name, _, tensor), target in zip(bucket, targets, strict=True)
            for part, target_part in zip(
                fingerprint.split_for_hashing(tensor), fingerprint.split_for_hashing(target), strict=True
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

    def pass_on_gpu(self, bucket: list[Shard], targets: list[Any]) -> None:
        """Casts, checks, fingerprints and copies in one pass over memory, and waits for the results of all at once.

        A target of None: the shard is not copied.
        """
        import torch

        from workers.sync.fingerprint_kernel import copy_and_hash

        flat = [tensor.detach().reshape(-1) for *_, tensor in bucket]
        results = [
            copy_and_hash(x, target, first) for x, target, (_, first, _) in zip(flat, targets, bucket, strict=True)
        ]
        for (name, *_), (number, bad) in zip(bucket, torch.stack(results).tolist(), strict=True):
            if bad:
                raise not_finite(name)
            if self.verify:
                self.record(name, number % fingerprint.MODULUS)

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
        raise not_finite(name)


def not_finite(name: str) -> FloatingPointError:
    return FloatingPointError(f"{name} is not finite after the last update; no engine samples with it.")
