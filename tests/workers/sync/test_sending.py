"""What a policy rank sends: which tensors, in which dtype, and which elements of them."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from workers.learner.zero import ZeroEngine
from workers.sync import fingerprint
from workers.sync.layout import plan_layout, shard_views, tensor_views
from workers.sync.outgoing import OutgoingWeights
from workers.sync.sending import PolicyWeights
from workers.sync.verify import combine_ranks, to_hex

BIAS, WEIGHT = "gate.e_score_correction_bias", "gate.weight"
MANIFEST = [(BIAS, "float32", [5]), (WEIGHT, "bfloat16", [5, 3])]


class Router(nn.Module):
    """In bfloat16, with a bias in float32, as transformers keeps it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(3, 5, bias=False).bfloat16()
        self.gate.register_buffer("e_score_correction_bias", torch.tensor([0.0, 1 / 3, 2 / 3, 4 / 3, 5 / 3]))
        self.gate.register_buffer("decay", torch.ones(5))  # follows from the configuration


class Rank(ZeroEngine):
    """One of two ranks, without DeepSpeed."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    def gathered(self, *tensors: Any) -> Any:
        return nullcontext()


def partition(model: Any, rank: int, ranks: int) -> None:
    """Marks parameters as ZeRO 3 does: a rank holds an equal share of the elements, the last one padded."""
    for parameter in model.parameters():
        size = -(-parameter.numel() // ranks)
        padded = torch.nn.functional.pad(parameter.detach().view(-1), (0, size * ranks - parameter.numel()))
        parameter.ds_id, parameter.ds_numel, parameter.ds_shape = 0, parameter.numel(), parameter.shape
        parameter.ds_tensor = padded[rank * size : (rank + 1) * size]


def expected_tensors() -> dict[str, torch.Tensor]:
    return {BIAS: torch.tensor([0.0, 1 / 3, 2 / 3, 4 / 3, 5 / 3]), WEIGHT: Router().gate.weight.detach()}


def test_a_routers_bias_is_sent_in_its_own_dtype_and_other_buffers_are_not_sent() -> None:
    weights = PolicyWeights(Router(), Rank(0, 1), torch.bfloat16, rank=0, shards=1)
    assert weights.manifest() == MANIFEST
    outgoing = OutgoingWeights(weights.full_buckets(), [], torch.bfloat16, uncast=weights.uncast)
    sent, expected = dict(outgoing.cast_tensors()), expected_tensors()
    assert sent.keys() == expected.keys()
    assert all(sent[name].dtype == expected[name].dtype for name in sent)
    assert all(torch.equal(sent[name], expected[name]) for name in sent)


def test_two_ranks_send_half_of_a_bias_each() -> None:
    layout, size = plan_layout(MANIFEST)
    memory, fingerprints, elements = torch.zeros(size, dtype=torch.uint8), [], []
    for rank in (0, 1):
        model = Router()
        partition(model, rank, 2)
        weights = PolicyWeights(model, Rank(rank, 2), torch.bfloat16, rank, shards=2)
        [bucket] = weights.shard_buckets()
        elements.append([(name, first, len(part)) for name, first, part in bucket])
        outgoing = OutgoingWeights([], [bucket], torch.bfloat16, uncast=weights.uncast)
        outgoing.copy_bucket(bucket, shard_views(memory, layout, bucket))
        fingerprints.append(outgoing.fingerprints)
    assert elements == [[(BIAS, 0, 3), (WEIGHT, 0, 8)], [(BIAS, 3, 2), (WEIGHT, 8, 7)]]
    expected = expected_tensors()
    assert all(torch.equal(arrived, expected[name]) for name, arrived in tensor_views(memory, layout))
    whole = {name: to_hex(fingerprint.hash_bytes(tensor, 2)) for name, tensor in expected.items()}
    assert combine_ranks(fingerprints) == whole
