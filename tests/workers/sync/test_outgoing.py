"""Weights on their way out: what arrives, its fingerprints, and which weights are refused."""

import pytest
import torch

from workers.sync import fingerprint
from workers.sync.layout import plan_layout, shard_views, tensor_views
from workers.sync.outgoing import BLOCK, OutgoingWeights
from workers.sync.parallel import parallel_map
from workers.sync.verify import combine_ranks, to_hex

SHAPES = {"embed": [3, BLOCK // 2 + 1], "norm": [5], "head": [7, 11]}  # the first takes more than one block


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cast_tensor_arrives_and_the_fingerprint_is_of_it(dtype: str) -> None:
    layout, size = plan_layout([(name, dtype, shape) for name, shape in SHAPES.items()])
    memory = torch.zeros(size, dtype=torch.uint8)
    tensors = list(make_tensors().items())
    outgoing = OutgoingWeights([tensors[:2], tensors[2:]], [], getattr(torch, dtype))
    for tensors_of_bucket in outgoing.full_buckets:
        bucket = [(name, 0, tensor) for name, tensor in tensors_of_bucket]
        outgoing.copy_bucket(bucket, shard_views(memory, layout, bucket))
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors}
    assert all(torch.equal(arrived, expected[name]) for name, arrived in tensor_views(memory, layout))
    fingerprints = {name: to_hex(fingerprint.hash_bytes(tensor)) for name, tensor in expected.items()}
    assert combine_ranks([outgoing.fingerprints]) == fingerprints
    cast = OutgoingWeights([tensors], [], getattr(torch, dtype))
    assert dict(cast.cast_tensors()).keys() == expected.keys()
    assert combine_ranks([cast.fingerprints]) == fingerprints


def test_named_tensors_keep_their_dtype() -> None:
    tensors = [*make_tensors().items()]
    outgoing = OutgoingWeights([tensors], [], torch.bfloat16, uncast={"norm"})
    cast = dict(outgoing.cast_tensors())
    assert {name: tensor.dtype for name, tensor in cast.items()} == {
        "embed": torch.bfloat16,
        "norm": torch.float32,
        "head": torch.bfloat16,
    }
    assert combine_ranks([outgoing.fingerprints])["norm"] == to_hex(fingerprint.hash_bytes(dict(tensors)["norm"]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_of_several_ranks_arrive_as_the_whole_and_so_do_fingerprints(ranks: int) -> None:
    layout, size = plan_layout([(name, "float32", shape) for name, shape in SHAPES.items()])
    memory, fingerprints = torch.zeros(size, dtype=torch.uint8), []
    for rank in range(ranks):
        outgoing = OutgoingWeights([], [], torch.float32)
        for name, tensor in make_tensors().items():
            length = -(-tensor.numel() // ranks)
            shard = tensor.view(-1)[rank * length : (rank + 1) * length]
            bucket = [(name, rank * length, shard)] if len(shard) else []
            outgoing.copy_bucket(bucket, shard_views(memory, layout, bucket))
        fingerprints.append(outgoing.fingerprints)
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
    layout, size = plan_layout([(name, "float16", shape) for name, shape in SHAPES.items()])
    bucket = [(name, 0, tensor) for name, tensor in tensors.items()]
    targets = shard_views(torch.zeros(size, dtype=torch.uint8), layout, bucket)
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        OutgoingWeights([], [], torch.float16).copy_bucket(bucket, targets)
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        list(OutgoingWeights([list(tensors.items())], [], torch.float16).cast_tensors())


def test_finite_weights_with_an_infinite_sum_are_accepted() -> None:
    OutgoingWeights([], [], torch.float32).copy_bucket([("large", 0, torch.full((4,), 3e38))], [torch.empty(4)])


def test_parallel_work_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert parallel_map(lambda i: (i, torch.get_num_threads()), range(5)) == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == before
