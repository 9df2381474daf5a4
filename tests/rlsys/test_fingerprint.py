import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.fingerprint import fingerprint


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator).to(dtype), torch.randn(6, generator=generator).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_weights_have_equal_fingerprints(dtype):
    assert fingerprint(weights(dtype)) == fingerprint([w.clone() for w in weights(dtype)])
    assert 0 < fingerprint(weights(dtype)) < 2**64


def test_fusing_and_splitting_tensors_changes_nothing():
    a, b = weights()
    expected = fingerprint([a, b])
    assert fingerprint([torch.cat([a.flatten(), b])]) == expected
    assert fingerprint([a[:2], a[2:], b[:1], b[1:]]) == expected
    assert fingerprint([b, a.t()]) == expected


def test_the_sum_of_fingerprints_is_the_fingerprint_of_all():
    assert sum(fingerprint([w]) for w in weights()) % 2**64 == fingerprint(weights())


def test_rows_of_zeros_do_not_count():
    a, b = weights()
    assert fingerprint([torch.cat([a, torch.zeros(3, 6)]), b, torch.zeros(5), torch.zeros(0)]) == fingerprint([a, b])
    assert fingerprint([]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(0, 15), st.integers(0, 5), st.integers(0, 3))
def test_a_flipped_bit_changes_the_fingerprint(dtype, bit, column, row):
    a, b = weights(dtype)
    expected = fingerprint([a, b])
    bits = a.view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[row, column] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert fingerprint([a, b]) != expected


def test_two_changes_that_cancel_each_other_change_the_fingerprint():
    a, b = weights()
    expected = fingerprint([a, b])
    a.view(torch.int32)[0, 0] += 1
    a.view(torch.int32)[3, 5] -= 1
    assert fingerprint([a, b]) != expected
    assert fingerprint([torch.tensor([1.0, -1.0])]) != fingerprint([torch.tensor([2.0, -2.0])])


def test_a_stale_tensor_changes_the_fingerprint():
    a, b = weights()
    assert fingerprint([a, b + 1e-6]) != fingerprint([a, b])
    assert fingerprint([a, torch.zeros_like(b)]) != fingerprint([a, b])


def test_the_same_numbers_in_another_precision_are_other_weights():
    a, b = weights(torch.bfloat16)
    assert fingerprint([a.float(), b.float()]) != fingerprint([a, b])


def test_long_tensors_are_read_in_parts(monkeypatch):
    expected = fingerprint(weights())
    monkeypatch.setattr("rlsys.fingerprint._CHUNK", 5)
    assert fingerprint(weights()) == expected
