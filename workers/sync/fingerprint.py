"""Numbers below 2^64 that tell whether two processes hold the same weights, bit for bit.

`hash_bytes`            of the tensor's bytes in order, at the speed of memory. For whole tensors on CPU.
`hash_with_positions`   a sum over elements, each hashed with its position. The sums of several shards add up.
`hash_unordered`        a sum over elements, each hashed alone. Elements that swap places go unnoticed.
"""

import math
import struct
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_CHUNK = 1 << 24  # elements
_PART = 1 << 22  # elements
_FACTORS = (-7046029254386353131, -4658895280553007687)  # 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as signed
MODULUS = 1 << 64


def hash_bytes(tensor: Tensor, shards: int = 1) -> int:
    """Hashes a tensor's bytes. `shards`: the number of ranks that each hold and hash an equal share of its elements."""
    flat = tensor.detach().reshape(-1)
    return combine_hashes(
        [
            xxhash.xxh3_64_intdigest(byte_view(part))
            for shard in flat.split(-(-len(flat) // shards) or 1)
            for part in split_for_hashing(shard)
        ]
    )


def split_for_hashing(tensor: Tensor) -> tuple[Tensor, ...]:
    """Splits a tensor's elements, in order, into parts that several cores can hash in parallel."""
    return tensor.detach().reshape(-1).split(_PART)


def combine_hashes(hashes: list[int]) -> int:
    """Returns `hash_bytes` of a tensor, given the hashes of its parts in order."""
    return hashes[0] if len(hashes) == 1 else xxhash.xxh3_64_intdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


class RunningHash:
    """`hash_bytes` of one part that arrives block by block."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()

    def add(self, block: memoryview) -> None:
        self.digest.update(block)

    def value(self) -> int:
        return self.digest.intdigest()


def byte_view(tensor: Tensor) -> memoryview:
    """Returns a tensor's elements in order, as integers of the same size."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()]).numpy().data


def hash_with_positions(tensor: Tensor, shape: Iterable[int], origin: tuple[int, int] = (0, 0)) -> int:
    """Hashes a block of a larger tensor of this `shape`. `origin`: the row and column where the block begins."""
    rows = tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:]))
    width = math.prod(list(shape)[1:])
    row, column = origin
    if has_kernel(tensor):
        from workers.sync.fingerprint_kernel import sum_of_hashes

        return sum_of_hashes(_as_integers(rows), (row, column, width)) % MODULUS
    columns = torch.arange(column, column + rows.shape[1], device=tensor.device)
    total = 0
    for part in rows.split(max(1, _CHUNK // rows.shape[1])):
        positions = torch.arange(row, row + len(part), device=tensor.device)[:, None] * width + columns
        total += int(_scramble(_to_integers(part) ^ _scramble(positions + 1)).sum())
        row += len(part)
    return total % MODULUS


def hash_unordered(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Hashes several tensors together. Zeros add nothing, so padding does not count.

    `dtype`: a wider one, in which numbers are hashed.
    """
    return sum(_hash_all_unordered(tensor.detach().reshape(-1), dtype) for tensor in tensors) % MODULUS


def _hash_all_unordered(flat: Tensor, dtype: torch.dtype | None) -> int:
    if dtype not in (None, flat.dtype):
        return sum(_hash_all_unordered(part.to(dtype), dtype) for part in flat.split(_CHUNK))
    if has_kernel(flat):
        from workers.sync.fingerprint_kernel import sum_of_hashes

        return sum_of_hashes(_as_integers(flat))
    return sum(int(_scramble(_to_integers(part)).sum()) for part in flat.split(_CHUNK))


def has_kernel(tensor: Tensor) -> bool:
    """Returns whether `fingerprint_kernel.py` hashes tensors of this device."""
    return tensor.is_cuda


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _to_integers(tensor: Tensor) -> Tensor:
    return _as_integers(tensor).to(torch.int64)


def _scramble(x: Tensor) -> Tensor:
    """Mixes the bits of each element."""
    for factor, shift in zip(_FACTORS, (29, 32), strict=True):
        x = x * factor
        x = x ^ (x >> shift)
    return x
