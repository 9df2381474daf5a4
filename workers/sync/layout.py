"""Where each tensor lies in a flat block of memory, and how tensors are grouped into buckets.

manifest   [("embed", "float32", [151936, 896]), ("norm", "float32", [896]), …]     what the policy has, in order
buckets    [[("embed", …), …], [("norm", …), …]]                                    what is sent in one part
layout     [("embed", "float32", [151936, 896], 0), …]                              the same with offsets in bytes
"""

import math
from typing import Any

ManifestEntry = tuple[str, str, list[int]]  # name, dtype, shape
Slot = tuple[str, str, list[int], int]  # the same, and the offset in bytes
NamedTensors = list[tuple[str, Any]]
Shard = tuple[str, int, Any]  # name, index of the first element in the whole tensor, elements

ALIGNMENT = 64  # bytes
BUCKET_BYTES = 512 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def aligned_bytes(entry: ManifestEntry) -> int:
    """Returns the size of a tensor, rounded up to a multiple of the alignment."""
    _, dtype, shape = entry
    return -(-math.prod(shape) * DTYPE_BYTES[dtype] // ALIGNMENT) * ALIGNMENT


def plan_layout(manifest: list[ManifestEntry]) -> tuple[list[Slot], int]:
    """Gives each tensor an offset. Returns the slots, and the size of all in bytes."""
    slots, offset = [], 0
    for entry in manifest:
        slots.append((*entry, offset))
        offset += aligned_bytes(entry)
    return slots, offset


def shard_range(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns first element and size of a rank's shard of a tensor, as ZeRO 3 divides it.  10, 2, 3 -> (8, 2)"""
    length = -(-count // ranks)
    first = min(rank * length, count)
    return first, min(length, count - first)


def plan_packet(bucket: list[ManifestEntry], rank: int, ranks: int) -> tuple[list[Slot], int]:
    """`plan_layout` of a rank's shards of a bucket."""
    return plan_layout(
        [(name, dtype, [shard_range(math.prod(shape), rank, ranks)[1]]) for name, dtype, shape in bucket]
    )


def split_into_buckets(manifest: list[ManifestEntry], limit: int = BUCKET_BYTES) -> list[list[ManifestEntry]]:
    """Groups neighbors into buckets of at most `limit` bytes. A larger tensor is not split: it is a bucket of its own."""
    buckets: list[list[ManifestEntry]] = []
    room = 0
    for entry in manifest:
        if aligned_bytes(entry) > room:
            buckets.append([])
            room = limit
        buckets[-1].append(entry)
        room -= aligned_bytes(entry)
    return buckets


def tensor_view(memory: Any, dtype: str, shape: list[int], offset: int) -> Any:
    """Returns the bytes at `offset` as a tensor that shares the memory."""
    import torch

    size = math.prod(shape) * DTYPE_BYTES[dtype]
    return memory[offset : offset + size].view(getattr(torch, dtype)).view(shape)


def shard_views(memory: Any, layout: list[Slot], bucket: list[Shard]) -> list[Any]:
    """Returns where the shards of a bucket lie in a layout of whole tensors, as flat tensors."""
    slots = {slot[0]: slot for slot in layout}
    whole = tensor_views(memory, [slots[name] for name, *_ in bucket])
    return [
        tensor.view(-1)[first : first + shard.numel()]
        for (_, tensor), (_, first, shard) in zip(whole, bucket, strict=True)
    ]


def tensor_views(memory: Any, layout: list[Slot]) -> NamedTensors:
    """Returns every tensor of a layout, sharing the memory."""
    return [(name, tensor_view(memory, dtype, shape, offset)) for name, dtype, shape, offset in layout]
