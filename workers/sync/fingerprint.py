"""Numbers below 2^64 that tell whether two processes hold the same weights, bit for bit.

`of_bytes`   the tensor's bytes in order, at the speed of memory. For whole tensors on CPU.
`of_places`  every element scrambled with its place, and added up: shares of a tensor on several devices add up to the whole.
`of_bits`    every element scrambled alone, and added up: it does not see that elements, or tensors, changed places.
"""

import math
import struct
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
_PART = 1 << 22  # elements
_FACTORS = (-7046029254386353131, -4658895280553007687)  # 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as signed
MODULUS = 1 << 64


def hash_bytes(tensor: Tensor, cut: int = 1) -> int:
    """`cut` is among how many its elements are dealt out evenly, each of whom knows the parts of its own."""
    flat = tensor.detach().reshape(-1)
    shares = flat.split(-(-len(flat) // cut) or 1)
    return combine_hashes(
        [xxhash.xxh3_64_intdigest(byte_view(part)) for share in shares for part in split_for_hashing(share)]
    )


def split_for_hashing(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor's elements in order, in pieces that several cores may look at side by side."""
    return tensor.detach().reshape(-1).split(_PART)


def combine_hashes(prints: list[int]) -> int:
    """`of_bytes` of a tensor, from those of its parts."""
    return prints[0] if len(prints) == 1 else xxhash.xxh3_64_intdigest(struct.pack(f"<{len(prints)}Q", *prints))


class RunningHash:
    """`of_bytes` of a part that comes block by block."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()

    def add(self, block: memoryview) -> None:
        self.digest.update(block)

    def value(self) -> int:
        return self.digest.intdigest()


def byte_view(tensor: Tensor) -> memoryview:
    """Its elements in order, as integers of their size."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()]).numpy().data


def hash_with_positions(tensor: Tensor, whole: Iterable[int], at: tuple[int, int] = (0, 0)) -> int:
    """`tensor` is all of a tensor of shape `whole`, or the part of it that begins in row and column `at`."""
    rows = tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:]))
    width = math.prod(list(whole)[1:])
    row, column = at
    columns = torch.arange(column, column + rows.shape[1], device=tensor.device)
    total = 0
    for part in rows.split(max(1, _CHUNK // rows.shape[1])):
        place = torch.arange(row, row + len(part), device=tensor.device)[:, None] * width + columns
        total += int(_scrambled(_bits(part) ^ _scrambled(place + 1)).sum())
        row += len(part)
    return total % MODULUS


def hash_unordered(tensors: Iterable[Tensor]) -> int:
    """Of all of them together. Zero adds nothing, so padding does not count."""
    return sum(int(_scrambled(_bits(part)).sum()) for tensor in tensors for part in _chunks(tensor)) % MODULUS


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.detach().reshape(-1).split(_CHUNK)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()]).to(torch.int64)


def _scrambled(x: Tensor) -> Tensor:
    for factor, shift in zip(_FACTORS, (29, 32), strict=True):
        x = x * factor
        x = x ^ (x >> shift)
    return x
