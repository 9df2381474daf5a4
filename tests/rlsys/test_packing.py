import numpy as np
import pytest
import torch
from fakes import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys import tiny
from rlsys.attention import NAME
from rlsys.logprobs import PackedLogprobs
from rlsys.losses import ppo_clip
from rlsys.packing import filler, pack, spread, token_weights, unpack
from rlsys.types import Batch, Prompt, Sample

# --- token_weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("token_mean", [0.25, 0.25, 0.25, 0.25]),  # 4 tokens in all
        ("sequence_mean", [0.5, 1 / 6, 1 / 6, 1 / 6]),  # 2 sequences, of 1 and 3 tokens
        ("constant", [0.1, 0.1, 0.1, 0.1]),  # 2 sequences, 5 tokens each by decree
    ],
)
def test_the_weights_of_two_sequences_by_hand(normalize, expected):
    assert token_weights(torch.tensor([1, 3]), normalize, constant=5).tolist() == pytest.approx(expected)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_weights_add_up_to_what_their_name_says(lengths):
    counts = torch.tensor(lengths)
    assert token_weights(counts, "token_mean").sum() == pytest.approx(1.0, rel=1e-5)
    assert token_weights(counts, "sequence_mean").sum() == pytest.approx(1.0, rel=1e-5)
    mean_length = sum(lengths) / len(lengths)
    assert token_weights(counts, "constant", constant=10).sum() == pytest.approx(mean_length / 10, rel=1e-5)
    shares = [s.sum().item() for s in token_weights(counts, "sequence_mean").split(lengths)]
    assert shares == pytest.approx([1 / len(lengths)] * len(lengths), rel=1e-5)


def test_a_sequence_without_tokens_has_no_weights():
    assert token_weights(torch.tensor([0, 2]), "token_mean").tolist() == [0.5, 0.5]
    assert token_weights(torch.tensor([0, 2]), "sequence_mean").tolist() == [0.25, 0.25]


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match="token_mean, sequence_mean, constant"):
        token_weights(torch.tensor([1]), "mean")
    with pytest.raises(ValueError, match="constant > 0"):
        token_weights(torch.tensor([1]), "constant")
    with pytest.raises(ValueError, match=r"\[2, -1\]"):
        token_weights(torch.tensor([2, -1]), "token_mean")


# --- spread ----------------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 20), max_size=25)


@given(SIZES, st.integers(1, 4), st.integers(1, 40))
def test_every_sequence_is_in_one_bin_and_bins_keep_the_budget(sizes, ranks, budget):
    bins = spread(sizes, ranks, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert len(bins) % ranks == 0
    assert len(bins) > 0
    for b in bins:
        assert sum(sizes[i] for i in b) <= budget or len(b) == 1


@given(SIZES, st.integers(1, 4))
def test_a_budget_for_everything_needs_one_bin_per_rank_and_fills_them_alike(sizes, ranks):
    bins = spread(sizes, ranks, budget=1000)
    assert len(bins) == ranks
    loads = [sum(sizes[i] for i in b) for b in bins]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_example_in_the_docstring():
    assert spread([5, 3, 3, 1], ranks=2, budget=6) == [[0, 3], [1, 2]]


# --- pack ------------------------------------------------------------------------------------------------------------------


def two_sequences() -> Batch:
    """The example of `Pack`: prompt "ab", completions "cd." and "e.", with a=1 b=2 c=3 d=4 e=5 and .=9."""

    def sample(index: int, tokens: list[int]) -> Sample:
        logprobs = np.array([-t / 10 for t in tokens], dtype=np.float32)
        return Sample("p", index, "", np.array(tokens, dtype=np.int32), logprobs, "stop", 1)

    return Batch(
        prompts=[Prompt("p", "", "ab", [1, 2], {})],
        samples=[sample(0, [3, 4, 9]), sample(1, [5, 9])],
        groups=np.array([0, 0]),
        rewards=np.array([1.0, 0.0], dtype=np.float32),
        components=[{}, {}],
    )


def test_two_sequences_are_packed_as_the_type_says():
    old = [np.array([-1, -2, -3], dtype=np.float32), np.array([-4, -5], dtype=np.float32)]
    [[p]] = pack(two_sequences(), [0, 1], ranks=1, tokens_per_pack=100, advantages=torch.tensor([0.5, -0.5]), old=old)
    assert p.tokens.tolist() == [1, 2, 3, 4, 1, 2, 5]
    assert p.lengths == [4, 3]
    assert p.predict.tolist() == [1, 2, 3, 5, 6]
    assert p.targets.tolist() == [3, 4, 9, 5, 9]
    assert p.sequences.tolist() == [0, 0, 0, 1, 1]
    assert p.samples == [0, 1]
    assert p.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert p.weights.tolist() == pytest.approx([0.2] * 5)
    assert p.rollout.tolist() == pytest.approx([-0.3, -0.4, -0.9, -0.5, -0.9])
    assert p.old is not None
    assert p.old.tolist() == [-1, -2, -3, -4, -5]
    assert p.ref is None


def test_only_the_members_are_packed_and_weigh_one_together():
    batch = make_batch([0, 1, 0, 1], [0, 0, 1, 1], lengths=[2, 3, 4, 5])
    packs = pack(batch, [1, 2], ranks=1, tokens_per_pack=100, advantages=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    [[p]] = packs
    assert p.samples == [1, 2]
    assert p.weights.tolist() == pytest.approx([1 / 7] * 7)
    assert p.advantages.tolist() == [2.0] * 3 + [3.0] * 4


def test_a_mini_batch_that_lost_all_its_samples_is_packs_that_add_nothing():
    packs = pack(make_batch([0], [0]), [], ranks=2, tokens_per_pack=10, advantages=torch.zeros(1))
    assert [len(own) for own in packs] == [1, 1]
    assert all(p.samples == [] and p.lengths == [1] and len(p.weights) == 0 for own in packs for p in own)


def test_a_filler_carries_the_same_columns_as_its_neighbours():
    batch = make_batch([0], [0])
    old = [np.zeros(3, dtype=np.float32)]
    packs = pack(batch, [0], ranks=3, tokens_per_pack=10, old=old)
    assert sum(p.samples == [] for own in packs for p in own) == 2
    assert all(p.old is not None and p.ref is None for own in packs for p in own)


BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda rows: make_batch(
        [0.0] * len(rows),
        [g for g, _ in rows],
        [n for _, n in rows],
        [1 + (g * 2) % 5 for g in range(max(g for g, _ in rows) + 1)],
    )
)


@given(BATCHES, st.integers(1, 3), st.integers(1, 40), st.sampled_from(["token_mean", "sequence_mean", "constant"]))
def test_every_token_is_packed_once_with_a_weight_that_knows_nothing_of_packs(batch, ranks, budget, normalize):
    members = list(range(len(batch.samples)))
    advantages = torch.arange(len(members), dtype=torch.float32)
    options = {"advantages": advantages, "normalize": normalize, "constant": 7}
    packs = pack(batch, members, ranks=ranks, tokens_per_pack=budget, **options)

    assert len(packs) == ranks
    assert len({len(own) for own in packs}) == 1, "every rank has the same number of packs"
    flat = [p for own in packs for p in own]
    for p in flat:
        assert len(p.tokens) == sum(p.lengths)
        assert sum(p.lengths) <= budget or len(p.lengths) == 1
    assert sorted(s for p in flat for s in p.samples) == members

    expected_weights = token_weights(torch.from_numpy(batch.lengths), normalize, constant=7).numpy()
    weights = unpack(packs, [[p.weights for p in own] for own in packs], len(members))
    np.testing.assert_array_equal(np.concatenate(weights), expected_weights)
    for name, expected in (
        ("targets", [s.tokens for s in batch.samples]),
        ("rollout", [s.logprobs for s in batch.samples]),
        ("advantages", [np.full(n, m) for m, n in enumerate(batch.lengths)]),
    ):
        values = unpack(packs, [[getattr(p, name) for p in own] for own in packs], len(members))
        for found, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(found, right)


@given(BATCHES, st.integers(1, 3), st.integers(1, 40))
def test_each_target_is_predicted_by_the_token_before_it(batch, ranks, budget):
    packs = pack(batch, range(len(batch.samples)), ranks=ranks, tokens_per_pack=budget)
    for p in (p for own in packs for p in own):
        starts = np.cumsum([0, *p.lengths])  # a filler has one length and no sample
        for s, (m, start, length) in enumerate(zip(p.samples, starts, p.lengths, strict=False)):
            whole = [*batch.prompts[batch.groups[m]].tokens, *batch.samples[m].tokens]
            assert p.tokens[start : start + length].tolist() == whole[:-1]
            mine = p.sequences == s
            assert [whole[i - start + 1] for i in p.predict[mine]] == p.targets[mine].tolist()
            assert p.predict[mine].tolist() == list(range(start + length - mine.sum(), start + length))


def test_fillers_unpack_to_nothing():
    assert unpack([[filler(False, False)]], [[np.zeros(0, dtype=np.float32)]], 0) == []


# --- one update, whatever the packs ----------------------------------------------------------------------------------------


def update_of(batch: Batch, ranks: int, budget: int, normalize: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one mini-batch, summed over the packs of all ranks."""
    model = tiny.untrained(0)
    model.set_attn_implementation(NAME)
    packed = PackedLogprobs(model, chunk=5)
    advantages = torch.linspace(-1, 1, len(batch.samples))
    old = [s.logprobs - 2.5 for s in batch.samples]
    total = 0.0
    packs = pack(
        batch,
        range(len(batch.samples)),
        ranks=ranks,
        tokens_per_pack=budget,
        advantages=advantages,
        normalize=normalize,
        constant=9,
        old=old,
    )
    for p in (p for own in packs for p in own):
        logprobs, _ = packed(p)
        loss = ppo_clip(logprobs, torch.as_tensor(p.old), torch.as_tensor(p.advantages), torch.as_tensor(p.sequences))
        share = (loss * torch.as_tensor(p.weights)).sum()
        share.backward()
        total += share.item()
    return total, {name: w.grad for name, w in model.named_parameters()}


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean", "constant"])
@settings(max_examples=6)
@given(ranks=st.integers(1, 3), budget=st.integers(8, 70))
def test_packing_does_not_change_the_loss_nor_its_gradient(normalize, ranks, budget):
    batch = make_batch([0] * 6, [0, 0, 1, 1, 2, 2], lengths=[1, 8, 3, 5, 2, 6], prompt_lengths=[7, 1, 4])
    loss, gradients = update_of(batch, 1, 1000, normalize)
    other_loss, other = update_of(batch, ranks, budget, normalize)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert max(g.abs().max() for g in gradients.values()) > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
