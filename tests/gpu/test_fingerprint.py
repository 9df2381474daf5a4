"""Fingerprints on a GPU: equal to the CPU's, in one pass over memory."""

import time
from collections.abc import Callable

import pytest
import torch

from workers.sync.fingerprint import hash_unordered, hash_with_positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (33, 129), (5, 3, 4097)])
def test_a_gpu_computes_the_cpus_fingerprints(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    wider = [shape[0] + 3, *shape[1:-1], shape[-1] + 5] if len(shape) == 2 else list(shape)
    origin = (2, 1) if len(shape) == 2 else (0, 0)
    assert hash_with_positions(tensor.cuda(), wider, origin) == hash_with_positions(tensor, wider, origin)
    assert hash_unordered([tensor.cuda()]) == hash_unordered([tensor])


def test_a_pass_takes_less_than_ten_times_as_long_as_a_copy() -> None:
    tensor = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16).view(1 << 14, -1)
    target = torch.empty_like(tensor)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    hashed, copied = seconds(lambda: hash_with_positions(tensor, tensor.shape)), seconds(lambda: target.copy_(tensor))
    print(f"fingerprint {hashed * 1e3:.2f} ms, copy {copied * 1e3:.2f} ms")
    assert hashed < 10 * copied
