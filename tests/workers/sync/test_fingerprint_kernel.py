"""The kernel for GPUs, computed by Triton's interpreter, against plain integers, and the bytes that it moves."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARE = """
import torch
from workers.sync.fingerprint import MODULUS, hash_unordered, hash_with_positions
from workers.sync.fingerprint_kernel import BLOCK, as_integers, copy_and_hash, sum_of_hashes

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

TIES = [1.00390625, 1.01171875, 1e-40, -1e-40, -0.0, 65000.0]  # halfway between two of bfloat16, and denormal
for source in (torch.float32, torch.bfloat16, torch.float16):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shard = torch.cat([torch.tensor(TIES), torch.randn(BLOCK)]).to(source)
        copy, expected = torch.empty(len(shard), dtype=dtype), shard.to(dtype)
        for target, result in ((copy, copy_and_hash(shard, copy, 5)), (None, copy_and_hash(expected, None, 5))):
            assert result.tolist()[0] % MODULUS == hash_with_positions(expected, [9999], (5, 0))
            assert result[1] == 0
        assert torch.equal(as_integers(copy), as_integers(expected)), (source, dtype)
        bad = shard.float()
        bad[7], bad[BLOCK + 2], bad[9] = float("nan"), -float("inf"), 3.4e38
        assert copy_and_hash(bad, copy, 5)[1] == (2 if dtype == torch.float32 else 3)
for bits in (0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000):  # NaN of each kind
    bad = torch.tensor([0, bits, 0], dtype=torch.int32).view(torch.float32)
    assert copy_and_hash(bad, torch.empty(3, dtype=torch.bfloat16), 0)[1] == 1, hex(bits)
"""

COUNT = """
import json, torch, traceback
from collections import Counter
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder
from workers.sync import fingerprint
from workers.sync.fingerprint_kernel import BLOCK
from workers.sync.outgoing import OutgoingBucket

COUNT, moved = 5 * BLOCK, Counter()
load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

def counted_load(self, pointers, mask, *more):
    moved["read"] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
    return load(self, pointers, mask, *more)

def counted_store(self, pointers, value, mask, *more):
    moved["written"] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
    return store(self, pointers, value, mask, *more)

class Tensors(TorchDispatchMode):  # every operation outside the kernel that returns new memory
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any("interpreter" in frame.filename for frame in traceback.extract_stack()):
            return result  # it copies what a kernel reads in place
        if not function.is_view and "empty" not in str(function):
            moved["read"] += sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
            moved["written"] += result.nbytes if isinstance(result, torch.Tensor) else 0
        return result

def count(work):
    moved.clear()
    with Tensors():
        work()
    return {name: number / COUNT for name, number in moved.items()}

InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
fingerprint.has_kernel = lambda tensor: True
weights = torch.randn(COUNT)
packet = torch.empty(COUNT, dtype=torch.bfloat16)
bucket = OutgoingBucket(0, [("w", "bfloat16", [COUNT])], [("w", 0, weights)], by_position=True)
print(json.dumps({
    "send": count(lambda: bucket.copy_to([packet])),
    "verify": count(lambda: fingerprint.hash_with_positions(packet.view(5, BLOCK), [5, BLOCK])),
    "in place": count(lambda: bucket.cast_and_check("w", packet, torch.bfloat16)),
}))
assert bucket.fingerprints["w"][0] == fingerprint.hash_with_positions(packet, [COUNT])
"""


def interpret(program: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_computes_what_plain_integers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(COMPARE, monkeypatch)


def test_a_fingerprint_costs_a_sender_nothing_and_an_engine_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes per weight, from float32 to bfloat16. A sum for every 4096 weights is all that is added to them."""
    moved = json.loads(interpret(COUNT, monkeypatch))
    cast = 4 + 2  # what a cast reads and writes anyway
    assert cast <= moved["send"]["read"] + moved["send"]["written"] <= 1.005 * cast
    for name in ("verify", "in place"):
        assert 2 <= moved[name]["read"] + moved[name]["written"] <= 1.01 * 2
    # A sender also reads the packet. An engine writes it, and copies it twice: into a layer, and where it is computed with.
    sync = cast + 2 + 2 + 2 * (2 + 2)
    added = sum(sum(moved[name].values()) for name in ("send", "verify")) - cast
    assert added / sync == pytest.approx(0.11, abs=0.01)
