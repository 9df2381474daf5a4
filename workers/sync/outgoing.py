"""A bucket of weights on its way out of the policy: cast, checked, fingerprinted and copied in a single pass.

A sync is bound by memory. So each tensor is read once: on CPU in blocks that stay in a core's cache for all four steps,
with parts of tensors in parallel, and on a GPU by one kernel.
"""

import math
from collections.abc import Iterator
from typing import Any

from workers.sync import fingerprint
from workers.sync.layout import ManifestEntry, Shard
from workers.sync.parallel import parallel_map

BLOCK = 1 << 17  # elements: half a megabyte in float32


class OutgoingBucket:
    """What a rank sends at a time. A transport either copies all of it, or casts all of it.

    number    of the bucket in the plan, from 0
    entries   its tensors as they are sent, whole: the same on all ranks
    shards    what this rank sends of them: its own shards, or whole tensors, or nothing

    OutgoingBucket(3, [("model.norm.weight", "bfloat16", [896])], [("model.norm.weight", 0, tensor [896])])

    `fingerprints` collects, by tensor, the fingerprint of each part that was copied or cast, unless `verify` is off.
    """

    def __init__(
        self,
        number: int,
        entries: list[ManifestEntry],
        shards: list[Shard],
        verify: bool = True,
        by_position: bool = False,
    ):
        self.number, self.entries, self.shards = number, entries, shards
        self.verify, self.by_position = verify, by_position
        self.fingerprints: dict[str, list[int]] = {}

    # --- tensor by tensor ---------------------------------------------------------------------------------------------

    def cast(self) -> list[Any]:
        """Returns the shards as they are sent: where they lie, if they need no cast."""
        import torch

        dtypes = {name: getattr(torch, dtype) for name, dtype, _ in self.entries}
        return [self.cast_and_check(name, tensor, dtypes[name], first) for name, first, tensor in self.shards]

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

    # --- into memory --------------------------------------------------------------------------------------------------

    def copy_to(self, targets: list[Any]) -> None:
        """Copies the shards to flat tensors of their sizes and of the dtypes that are sent, in host memory or on the GPU."""
        if any(map(fingerprint.has_kernel, targets)):
            self.pass_on_gpu(
                [
                    (name, first, tensor.to(t.device))
                    for (name, first, tensor), t in zip(self.shards, targets, strict=True)
                ],
                targets,
            )
            return
        # What hashes blocks in a core's cache hashes bytes only, and blocks on a GPU have no cache to stay in.
        if self.by_position or any(tensor.device.type != "cpu" for *_, tensor in self.shards):
            for (name, first, tensor), target in zip(self.shards, targets, strict=True):
                target.copy_(self.cast_and_check(name, tensor, target.dtype, first).reshape(-1))
            return
        parts = [
            (name, part, target_part)
            for (name, _, tensor), target in zip(self.shards, targets, strict=True)
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

    def pass_on_gpu(self, shards: list[Shard], targets: list[Any]) -> None:
        """Casts, checks, fingerprints and copies in one pass over memory, and waits for the results of all at once.

        A target of None: the shard is not copied.
        """
        import torch

        from workers.sync.fingerprint_kernel import copy_and_hash

        flat = [tensor.detach().reshape(-1) for *_, tensor in shards]
        results = [
            copy_and_hash(x, target, first) for x, target, (_, first, _) in zip(flat, targets, shards, strict=True)
        ]
        for (name, *_), (number, bad) in zip(shards, torch.stack(results).tolist(), strict=True):
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
