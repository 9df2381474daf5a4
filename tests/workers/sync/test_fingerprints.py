"""Fingerprints differ whenever weights differ, and agree between whole tensors and shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sync.fingerprint import (
    MODULUS,
    combine_hashes,
    hash_bytes,
    hash_unordered,
    hash_with_positions,
    split_for_hashing,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator).to(dtype), torch.randn(6, generator=generator).to(dtype)]


def with_positions(tensor):
    return hash_with_positions(tensor, tensor.shape)


def unordered(tensor):
    return hash_unordered([tensor])


EACH = pytest.mark.parametrize("fingerprint", [hash_bytes, with_positions, unordered])


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_have_equal_fingerprints(fingerprint, dtype):
    for w in weights(dtype):
        assert fingerprint(w) == fingerprint(w.clone())
        assert 0 < fingerprint(w) < MODULUS


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None)
@given(st.integers(0, 15), st.integers(0, 5), st.integers(0, 3))
def test_a_flipped_bit_changes_the_fingerprint(fingerprint, dtype, bit, column, row):
    a, _ = weights(dtype)
    expected = fingerprint(a)
    bits = a.view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[row, column] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert fingerprint(a) != expected


@EACH
def test_two_changes_that_cancel_each_other_change_the_fingerprint(fingerprint):
    a, _ = weights()
    expected = fingerprint(a)
    a.view(torch.int32)[0, 0] += 1
    a.view(torch.int32)[3, 5] -= 1
    assert fingerprint(a) != expected
    assert fingerprint(torch.tensor([1.0, -1.0])) != fingerprint(torch.tensor([2.0, -2.0]))


@EACH
def test_the_same_numbers_in_another_precision_are_other_weights(fingerprint):
    a, _ = weights(torch.bfloat16)
    assert fingerprint(a.float()) != fingerprint(a)


@pytest.mark.parametrize("fingerprint", [hash_bytes, with_positions])
def test_elements_that_swapped_places_are_other_weights(fingerprint):
    a, _ = weights()
    assert fingerprint(a.flip(0)) != fingerprint(a)
    assert fingerprint(a.flip(1)) != fingerprint(a)
    assert fingerprint(a.t()) != fingerprint(a)


@EACH
def test_rows_of_a_fused_matrix_have_the_fingerprint_of_their_matrix(fingerprint):
    a, _ = weights()
    fused = torch.cat([torch.ones(3, 6), a, torch.ones(2, 6)])
    assert fingerprint(fused.narrow(0, 3, 4)) == fingerprint(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_hashed_with_positions_add_up_to_the_whole(dtype):
    a, b = weights(dtype)
    rows = hash_with_positions(a[:1], a.shape) + hash_with_positions(a[1:], a.shape, (1, 0))
    columns = hash_with_positions(a[:, :4], a.shape) + hash_with_positions(a[:, 4:], a.shape, (0, 4))
    assert rows % MODULUS == columns % MODULUS == hash_with_positions(a, a.shape)
    assert hash_with_positions(a[:0], a.shape, (len(a), 0)) == 0, "a device may hold nothing of a small vocabulary"
    assert (
        hash_with_positions(b[:3], b.shape) + hash_with_positions(b[3:], b.shape, (3, 0))
    ) % MODULUS == hash_with_positions(b, b.shape)


def test_the_unordered_hash_ignores_grouping_and_padding():
    a, b = weights()
    expected = hash_unordered([a, b])
    assert hash_unordered([torch.cat([a.flatten(), b])]) == expected
    assert hash_unordered([b, a.t()]) == expected
    assert (hash_unordered([a]) + hash_unordered([b])) % MODULUS == expected
    assert hash_unordered([torch.cat([a, torch.zeros(3, 6)]), b, torch.zeros(0)]) == expected
    assert hash_unordered([]) == 0


def test_bytes_hash_the_same_whole_or_in_parts_but_not_in_another_order(monkeypatch):
    a, _ = weights()
    monkeypatch.setattr("workers.sync.fingerprint._PART", 10)  # 24 elements: three parts
    expected = hash_bytes(a)
    first, second, third = (hash_bytes(part) for part in split_for_hashing(a))
    assert combine_hashes([first, second, third]) == expected
    assert combine_hashes([second, first, third]) != expected
    a.view(torch.int32)[3, 5] ^= 1
    assert hash_bytes(a) != expected


def test_long_tensors_are_read_in_parts(monkeypatch):
    a, b = weights()
    expected = with_positions(a), hash_unordered([a, b])
    monkeypatch.setattr("workers.sync.fingerprint._CHUNK", 7)
    assert (with_positions(a), hash_unordered([a, b])) == expected
