"""Weights on their way out: what arrives, what is said of it, and what is not let go."""

import pytest
import torch

from workers.sync import fingerprint
from workers.sync.host_memory import buckets, places, views
from workers.sync.outgoing import BLOCK, Outgoing
from workers.sync.proof import of_ranks, shown
from workers.sync.side_by_side import side_by_side

SHAPES = {"embed": [3, BLOCK // 2 + 1], "norm": [5], "head": [7, 11]}  # the first takes more than one block


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_the_cast_tensor_and_its_fingerprint_is_of_that(dtype: str) -> None:
    layout, size = places([(name, dtype, shape) for name, shape in SHAPES.items()])
    memory = torch.zeros(size, dtype=torch.uint8)
    named = list(tensors().items())
    outgoing = Outgoing([named[:2], named[2:]], [], getattr(torch, dtype))
    for bucket in outgoing:
        outgoing.copy([(name, 0, tensor) for name, tensor in bucket], layout, memory)
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in named}
    assert all(torch.equal(arrived, wanted[name]) for name, arrived in views(memory, layout))
    prints = {name: shown(fingerprint.of_bytes(tensor)) for name, tensor in wanted.items()}
    assert of_ranks([outgoing.prints]) == prints
    cast = Outgoing([named], [], getattr(torch, dtype))
    assert dict(cast.cast()).keys() == wanted.keys()
    assert of_ranks([cast.prints]) == prints


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_of_several_ranks_arrive_as_the_whole_and_so_do_their_fingerprints(ranks: int) -> None:
    layout, size = places([(name, "float32", shape) for name, shape in SHAPES.items()])
    memory, found = torch.zeros(size, dtype=torch.uint8), []
    for rank in range(ranks):
        outgoing = Outgoing([], [], torch.float32)
        for name, tensor in tensors().items():
            share = -(-tensor.numel() // ranks)
            piece = tensor.view(-1)[rank * share : (rank + 1) * share]
            outgoing.copy([(name, rank * share, piece)] if len(piece) else [], layout, memory)
        found.append(outgoing.prints)
    wanted = tensors()
    assert all(torch.equal(arrived, wanted[name]) for name, arrived in views(memory, layout))
    assert of_ranks(found) == {name: shown(fingerprint.of_bytes(tensor, ranks)) for name, tensor in wanted.items()}
    assert ("norm" in found[-1]) == (ranks < 4), "five elements are two for each of three"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_weights_that_are_not_finite_in_the_engines_dtype_are_refused(bad: float) -> None:
    named = tensors()
    named["embed"].view(-1)[-1] = bad
    layout, size = places([(name, "float16", shape) for name, shape in SHAPES.items()])
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        Outgoing([], [], torch.float16).copy(
            [(name, 0, w) for name, w in named.items()], layout, torch.zeros(size, dtype=torch.uint8)
        )
    with pytest.raises(FloatingPointError, match="embed is not finite"):
        list(Outgoing([list(named.items())], [], torch.float16).cast())


def test_finite_weights_whose_sum_is_not_are_let_go() -> None:
    layout, size = places([("large", "float32", [4])])
    memory = torch.zeros(size, dtype=torch.uint8)
    Outgoing([], [], torch.float32).copy([("large", 0, torch.full((4,), 3e38))], layout, memory)


def test_buckets_keep_order_and_size_and_cut_no_tensor() -> None:
    manifest = [(name, "float32", [count]) for name, count in {"a": 16, "b": 16, "c": 100, "d": 16, "e": 1}.items()]
    found = [[name for name, _, _ in bucket] for bucket in buckets(manifest, limit=192)]
    assert found == [["a", "b"], ["c"], ["d", "e"]]  # "c" alone is more than a bucket; "e" takes 64 bytes


def test_moving_memory_on_all_cores_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert side_by_side(lambda i: (i, torch.get_num_threads()), range(5)) == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == before
