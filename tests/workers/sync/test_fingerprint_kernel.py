"""The kernel for GPUs, computed by Triton's interpreter, against plain integers."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARE = """
import torch
from workers.sync.fingerprint import hash_unordered, hash_with_positions
from workers.sync.fingerprint_kernel import BLOCK, sum_of_hashes

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
BITS = (1 << 64) - 1

def scramble(x):
    x = x * 0x9E3779B97F4A7C15 & BITS
    x ^= shift(x, 29)
    x = x * 0xBF58476D1CE4E5B9 & BITS
    return x ^ shift(x, 32)

def shift(x, by):  # of a signed number
    return ((x - (1 << 64) if x >> 63 else x) >> by) & BITS

def plain(rows, place):
    row, column, width = place
    return sum(
        scramble((x & BITS) ^ scramble((row + i) * width + column + j + 1))
        for i, line in enumerate(rows.tolist()) for j, x in enumerate(line)
    ) & BITS

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
    for rows, columns, place in [(3, 5, (0, 0, 5)), (2, 7, (4, 9, 40)), (1, 1, (0, 0, 1)), (3, BLOCK, (1, 2, 9000))]:
        tensor = torch.randn(rows, columns).to(dtype)
        integers = tensor.view(INTEGERS[tensor.element_size()])
        assert sum_of_hashes(integers, place) & BITS == plain(integers, place), (dtype, rows, columns)
        alone = sum(scramble(x & BITS) for line in integers.tolist() for x in line) & BITS
        assert sum_of_hashes(integers.reshape(-1)) & BITS == alone == hash_unordered([tensor])
    assert sum_of_hashes(integers, (0, 0, columns)) & BITS == hash_with_positions(tensor, tensor.shape)
assert sum_of_hashes(torch.empty(0, 3, dtype=torch.int16), (0, 0, 3)) == 0
"""


def test_the_kernel_computes_what_plain_integers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
