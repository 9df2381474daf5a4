"""Weights on their way out: what arrives, its fingerprints, and which weights are refused."""

import pytest
import torch

from workers.sync import fingerprint
from workers.sync.layout import plan_layout, shard_views, tensor_views
from workers.sync.outgoing import BLOCK, OutgoingBucket
from workers.sync.parallel import parallel_map
from workers.sync.verify import combine_ranks, to_hex

SHAPES = {"embed": [3, BLOCK // 2 + 1], "norm": [5], "head": [7, 11]}  # the first takes more than one block


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def bucket_of(tensors: dict[str, torch.Tensor], dtype: str, **dtypes: str) -> OutgoingBucket:
    """Whole tensors, which are sent in `dtype`, or in one of their own."""
    entries = [(name, dtypes.get(name, dtype), list(tensor.shape)) for name, tensor in tensors.items()]
    return OutgoingBucket(0, entries, [(name, 0, tensor) for name, tensor in tensors.items()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cast_tensor_arrives_and_the_fingerprint_is_of_it(dtype: str) -> None:
    tensors = make_tensors()
    copied, cast = bucket_of(tensors, dtype), bucket_of(tensors, dtype)
    layout, size = plan_layout(copied.entries)
    memory = torch.zeros(size, dtype=torch.uint8)
    copied.copy_to(shard_views(memory, layout, copied.shards))
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    assert all(torch.equal(arrived, expected[name]) for name, arrived in tensor_views(memory, layout))
    fingerprints = {name: to_hex(fingerprint.hash_bytes(tensor)) for name, tensor in expected.items()}
    assert combine_ranks([copied.fingerprints]) == fingerprints
    assert all(torch.equal(*pair) for pair in zip(cast.cast(), expected.values(), strict=True))
    assert combine_ranks([cast.fingerprints]) == fingerprints


def test_tensors_are_sent_in_the_dtypes_of_the_plan() -> None:
    tensors = make_tensors()
    bucket = bucket_of(tensors, "bfloat16", norm="float32")
    assert [tensor.dtype for tensor in bucket.cast()] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert combine_ranks([bucket.fingerprints])["norm"] == to_hex(fingerprint.hash_bytes(tensors["norm"]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_of_several_ranks_arrive_as_the_whole_and_so_do_fingerprints(ranks: int) -> None:
    layout, size = plan_layout([(name, "float32", shape) for name, shape in SHAPES.items()])
    memory, fingerprints = torch.zeros(size, dtype=torch.uint8), []
    for rank in range(ranks):
        shards = []
        for name, tensor in make_tensors().items():
            length = -(-tensor.numel() // ranks)
            shard = tensor.view(-1)[rank * length : (rank + 1) * length]
            shards += [(name, rank * length, shard)] if len(shard) else []
        bucket = OutgoingBucket(0, [slot[:3] for slot in layout], shards)
        bucket.copy_to(shard_views(memory, layout, shards))
        fingerprints.append(bucket.fingerprints)
    expected = make_tensors()
    assert all(torch.equal(arrived, expected[name]) for name, arrived in tensor_views(memory, layout))
    assert combine_ranks(fingerprints) == {
        name: to_hex(fingerprint.hash_bytes(tensor, ranks)) for name, tensor in expected.items()
    }
    assert ("norm" in fingerprints[-1]) == (ranks < 4), "five elements are two for each of three ranks"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_weights_that_are_not_finite_in_the_engines_dtype_are_refused(bad: float) -> None:
    tensors = make_tensors()
    tensors["embed"].view(-1)[-1] = bad
    bucket = bucket_of(tensors, "float16")
    layout, size = plan_layout(bucket.entries)
    targets = shard_views(torch.zeros(size, dtype=torch.uint8), layout, bucket.shards)
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        bucket.copy_to(targets)
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        bucket.cast()


def test_finite_weights_with_an_infinite_sum_are_accepted() -> None:
    bucket_of({"large": torch.full((4,), 3e38)}, "float32").copy_to([torch.empty(4)])


def test_parallel_work_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert parallel_map(lambda i: (i, torch.get_num_threads()), range(5)) == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == before
