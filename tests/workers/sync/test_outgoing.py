"""Weights on their way out: what arrives, what is said of it, and what is not let go."""

import pytest
import torch

from workers.sync import fingerprint
from workers.sync.host_memory import plan_layout, split_into_buckets, tensor_views
from workers.sync.outgoing import BLOCK, OutgoingWeights
from workers.sync.parallel import parallel_map
from workers.sync.verify import combine_ranks, to_hex

SHAPES = {"embed": [3, BLOCK // 2 + 1], "norm": [5], "head": [7, 11]}  # the first takes more than one block


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_the_cast_tensor_and_its_fingerprint_is_of_that(dtype: str) -> None:
    layout, size = plan_layout([(name, dtype, shape) for name, shape in SHAPES.items()])
    memory = torch.zeros(size, dtype=torch.uint8)
    named = list(tensors().items())
    outgoing = OutgoingWeights([named[:2], named[2:]], [], getattr(torch, dtype))
    for bucket in outgoing:
        outgoing.copy_bucket([(name, 0, tensor) for name, tensor in bucket], layout, memory)
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in named}
    assert all(torch.equal(arrived, wanted[name]) for name, arrived in tensor_views(memory, layout))
    prints = {name: to_hex(fingerprint.hash_bytes(tensor)) for name, tensor in wanted.items()}
    assert combine_ranks([outgoing.fingerprints]) == prints
    cast = OutgoingWeights([named], [], getattr(torch, dtype))
    assert dict(cast.cast_tensors()).keys() == wanted.keys()
    assert combine_ranks([cast.fingerprints]) == prints


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_of_several_ranks_arrive_as_the_whole_and_so_do_their_fingerprints(ranks: int) -> None:
    layout, size = plan_layout([(name, "float32", shape) for name, shape in SHAPES.items()])
    memory, found = torch.zeros(size, dtype=torch.uint8), []
    for rank in range(ranks):
        outgoing = OutgoingWeights([], [], torch.float32)
        for name, tensor in tensors().items():
            share = -(-tensor.numel() // ranks)
            piece = tensor.view(-1)[rank * share : (rank + 1) * share]
            outgoing.copy_bucket([(name, rank * share, piece)] if len(piece) else [], layout, memory)
        found.append(outgoing.fingerprints)
    wanted = tensors()
    assert all(torch.equal(arrived, wanted[name]) for name, arrived in tensor_views(memory, layout))
    assert combine_ranks(found) == {
        name: to_hex(fingerprint.hash_bytes(tensor, ranks)) for name, tensor in wanted.items()
    }
    assert ("norm" in found[-1]) == (ranks < 4), "five elements are two for each of three"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_weights_that_are_not_finite_in_the_engines_dtype_are_refused(bad: float) -> None:
    named = tensors()
    named["embed"].view(-1)[-1] = bad
    layout, size = plan_layout([(name, "float16", shape) for name, shape in SHAPES.items()])
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        OutgoingWeights([], [], torch.float16).copy_bucket(
            [(name, 0, w) for name, w in named.items()], layout, torch.zeros(size, dtype=torch.uint8)
        )
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        list(OutgoingWeights([list(named.items())], [], torch.float16).cast_tensors())


def test_finite_weights_whose_sum_is_not_are_let_go() -> None:
    layout, size = plan_layout([("large", "float32", [4])])
    memory = torch.zeros(size, dtype=torch.uint8)
    OutgoingWeights([], [], torch.float32).copy_bucket([("large", 0, torch.full((4,), 3e38))], layout, memory)


def test_buckets_keep_order_and_size_and_cut_no_tensor() -> None:
    manifest = [(name, "float32", [count]) for name, count in {"a": 16, "b": 16, "c": 100, "d": 16, "e": 1}.items()]
    found = [[name for name, _, _ in bucket] for bucket in split_into_buckets(manifest, limit=192)]
    assert found == [["a", "b"], ["c"], ["d", "e"]]  # "c" alone is more than a bucket; "e" takes 64 bytes


def test_moving_memory_on_all_cores_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert parallel_map(lambda i: (i, torch.get_num_threads()), range(5)) == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == before
