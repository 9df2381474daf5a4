"""A number that tells whether two processes hold the same weights, bit for bit.

The engine fuses matrices (q, k and v into one) and splits them over devices, so the fingerprint must not depend on how
elements are grouped: each element's bits are scrambled into 64 and the results added, modulo 2^64. Zero adds nothing, so
padding rows do not count. A flipped bit or a stale tensor changes the sum; two elements that changed places do not.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
_FACTORS = (-7046029254386353131, -4658895280553007687)  # 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as signed


def fingerprint(tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        bits = flat.view(_BITS[flat.element_size()])
        for part in bits.split(_CHUNK):
            x = part.to(torch.int64)
            for factor, shift in zip(_FACTORS, (29, 32), strict=True):
                x = x * factor
                x = x ^ (x >> shift)
            total += int(x.sum())
    return total % (1 << 64)
