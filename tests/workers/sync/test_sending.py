"""What a policy rank sends: which tensors, in which dtype, and which elements of them."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from workers.learner.zero import ZeroEngine
from workers.sync import fingerprint
from workers.sync.layout import ManifestEntry, plan_layout, shard_views, split_into_buckets, tensor_views
from workers.sync.outgoing import OutgoingBucket
from workers.sync.sending import PolicyWeights, WeightSender
from workers.sync.transport import Message
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
    with weights.own(MANIFEST, whole_of_all_ranks=False) as shards:
        cast = OutgoingBucket(0, MANIFEST, shards).cast()
    sent, expected = dict(zip((name for name, *_ in shards), cast, strict=True)), expected_tensors()
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
        with weights.own(MANIFEST, whole_of_all_ranks=False) as shards:
            bucket = OutgoingBucket(0, MANIFEST, shards)
            bucket.copy_to(shard_views(memory, layout, shards))
        elements.append([(name, first, len(part)) for name, first, part in shards])
        fingerprints.append(bucket.fingerprints)
    assert elements == [[(BIAS, 0, 3), (WEIGHT, 0, 8)], [(BIAS, 3, 2), (WEIGHT, 8, 7)]]
    expected = expected_tensors()
    assert all(torch.equal(arrived, expected[name]) for name, arrived in tensor_views(memory, layout))
    whole = {name: to_hex(fingerprint.hash_bytes(tensor, 2)) for name, tensor in expected.items()}
    assert combine_ranks(fingerprints) == whole


class Transport:
    """Casts what it is given, and keeps it."""

    needs_concurrent_receive = reuses_memory = replayable = False
    sends_shards = reads_in_place = True

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[str]]] = []

    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message:
        return {"in_place": in_place}

    def connect(self, info: Message) -> None: ...

    def send(self, bucket: OutgoingBucket) -> list[str]:
        bucket.cast()
        self.sent.append((bucket.number, [name for name, *_ in bucket.shards]))
        return [name for name, *_ in bucket.entries]

    def finish_send(self) -> None: ...


def sender_of(model: Any, dtype: torch.dtype, rank: int = 0, **facts: bool) -> tuple[WeightSender, Transport]:
    transport: Any = Transport()
    vars(transport).update(facts)
    sender = WeightSender(PolicyWeights(model, Rank(rank, 2), dtype, rank, shards=1), transport, False)
    sender.connection_info()
    return sender, transport


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two tensors is a bucket of its own."""
    monkeypatch.setattr("workers.sync.sending.split_into_buckets", partial(split_into_buckets, limit=64))


@pytest.mark.usefixtures("small_buckets")
def test_weights_are_sent_by_number_unless_engines_read_them_where_they_lie() -> None:
    for dtype, in_place, parts in ((torch.bfloat16, True, 1), (torch.float32, False, 2)):
        sender, transport = sender_of(Router(), dtype)
        assert sender.connection_info().items() >= {"in_place": in_place, "parts": parts}.items()
        names = [name for number in range(parts) for name in sender.send(number, verify=True)]
        assert names == [BIAS, WEIGHT]
        assert [number for number, _ in transport.sent] == list(range(parts))
        assert sender.fingerprints().keys() == {BIAS, WEIGHT}
    copied, _ = sender_of(Router(), torch.bfloat16, reads_in_place=False)
    assert len(copied.buckets) == 2


@pytest.mark.usefixtures("small_buckets")
def test_a_bucket_that_fails_fails_the_later_ones_until_the_next_sync() -> None:
    model = Router()
    sender, transport = sender_of(model, torch.float32)
    sound = model.gate.weight.detach().clone()
    model.gate.e_score_correction_bias[3] = torch.nan
    for number in (0, 1):
        with pytest.raises(FloatingPointError, match=f"{BIAS} is not finite"):
            sender.send(number, verify=True)
    with pytest.raises(FloatingPointError, match=BIAS):
        sender.fingerprints()
    assert transport.sent == []
    model.gate.e_score_correction_bias[3] = 0.0
    for number in (0, 1):
        sender.send(number, verify=True)
    assert sender.fingerprints()[WEIGHT] == [fingerprint.hash_bytes(sound.float())]


@pytest.mark.parametrize(("sends_shards", "expected"), [(True, []), (False, [BIAS, WEIGHT])])
def test_a_second_rank_sends_whole_tensors_only_where_engines_read_each_ranks_memory(
    sends_shards: bool, expected: list[str]
) -> None:
    sender, transport = sender_of(Router(), torch.float32, rank=1, sends_shards=sends_shards)
    assert sender.send(0, verify=True) == [BIAS, WEIGHT], "the plan is the same on all ranks"
    assert transport.sent == [(0, expected)]
    assert sender.fingerprints() == {}, "rank 0 has all of them"
