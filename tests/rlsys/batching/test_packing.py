import itertools
from dataclasses import replace

import numpy as np
import plain
import pytest
import torch
from fakes import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.losses import ppo_clip
from rlsys.batching.balance import SequenceSize, count_attention_pairs
from rlsys.batching.packing import empty_pack, pack, token_weights, unpack
from rlsys.config.methods import NORMALIZERS
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.tasks import zigzag
from rlsys.types import Batch, Columns, Floats, Observation, Pack, Prompt, Sample

# --- token_weights ----------------------------------------------------------------------------------------------------

OPTIONS = {"constant": {"constant": 7}, "decoupled": {"control_weight": 0.125}}


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("token_mean", [0.25, 0.25, 0.25, 0.25]),  # 4 tokens in all
        ("sequence_mean", [0.5, 1 / 6, 1 / 6, 1 / 6]),  # 2 sequences, of 1 and 3 tokens
        ("sequence_sum", [0.5, 0.5, 0.5, 0.5]),  # 2 sequences
        ("constant", [0.1, 0.1, 0.1, 0.1]),  # 2 sequences, 5 tokens each by definition
        (
            "decoupled",
            [5e-4, 5e-4, 0.25, 0.25],
        ),  # the first of each by control_weight, then 2 more in one of 2 sequences
    ],
)
def test_the_weights_of_two_sequences_by_hand(normalize, expected):
    assert token_weights(torch.tensor([1, 3]), normalize, constant=5).tolist() == pytest.approx(expected)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=20))
def test_weights_equal_a_plain_loop_over_tokens(lengths):
    for normalize in NORMALIZERS:
        options = OPTIONS.get(normalize, {})
        result = token_weights(torch.tensor(lengths, dtype=torch.long), normalize, **options)
        assert result.dtype == torch.float32
        assert result.tolist() == pytest.approx(plain.token_weights(lengths, normalize, **options), rel=1e-5), normalize


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_weights_add_up_to_what_their_name_says(lengths):
    counts, mean_length = torch.tensor(lengths), sum(lengths) / len(lengths)
    assert token_weights(counts, "token_mean").sum() == pytest.approx(1.0, rel=1e-5)
    assert token_weights(counts, "sequence_mean").sum() == pytest.approx(1.0, rel=1e-5)
    assert token_weights(counts, "sequence_sum").sum() == pytest.approx(mean_length, rel=1e-5)
    assert token_weights(counts, "constant", constant=10).sum() == pytest.approx(mean_length / 10, rel=1e-5)
    longer = sum(n > 1 for n in lengths) / len(lengths)
    assert token_weights(counts, "decoupled", control_weight=0.5).sum() == pytest.approx(0.5 + longer, rel=1e-5)
    shares = [s.sum().item() for s in token_weights(counts, "sequence_mean").split(lengths)]
    assert shares == pytest.approx([1 / len(lengths)] * len(lengths), rel=1e-5)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_weights_of_a_sequence_do_not_depend_on_its_position(lengths, rng):
    order = list(range(len(lengths)))
    rng.shuffle(order)
    moved = [lengths[i] for i in order]
    for normalize in NORMALIZERS:
        options = OPTIONS.get(normalize, {})
        before = token_weights(torch.tensor(lengths), normalize, **options).split(lengths)
        after = token_weights(torch.tensor(moved), normalize, **options).split(moved)
        assert all(torch.equal(after[k], before[i]) for k, i in enumerate(order)), normalize


@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_a_sequence_without_tokens_has_no_weights_but_counts_as_a_sequence(normalize):
    options = OPTIONS.get(normalize, {})
    result = token_weights(torch.tensor([0, 2, 0, 1, 0]), normalize, **options)
    expected = token_weights(torch.tensor([2, 1]), normalize, **options)
    share = 1.0 if normalize == "token_mean" else 2 / 5  # 2 of 5 sequences have tokens
    assert result.tolist() == pytest.approx((expected * share).tolist())


@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_without_sequences_or_tokens_there_are_no_weights(normalize):
    for lengths in ([], [0], [0, 0]):
        result = token_weights(torch.tensor(lengths, dtype=torch.long), normalize, **OPTIONS.get(normalize, {}))
        assert (result.shape, result.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1], {"normalize": "mean"}, "normalize is 'mean'; known: token_mean, .*sequence_sum.*, decoupled"),
        ([1], {"normalize": "constant"}, "constant > 0; it is 0"),
        ([1], {"normalize": "constant", "constant": -5}, "constant is -5"),
        ([1], {"normalize": "decoupled", "control_weight": -0.1}, "control_weight is -0.1"),
        ([1], {"normalize": "decoupled", "control_weight": float("nan")}, "control_weight is nan"),
        ([2, -1], {"normalize": "token_mean"}, r"\[2, -1\]"),
        ([1.5], {"normalize": "token_mean"}, r"\[1.5\]"),
        ([[1, 2]], {"normalize": "token_mean"}, r"\[\[1, 2\]\]"),
    ],
)
def test_wrong_weight_options_are_refused_with_their_value(lengths, options, message):
    with pytest.raises(ValueError, match=f"^token_weights: .*{message}"):
        token_weights(torch.tensor(lengths), **options)


# --- pack -------------------------------------------------------------------------------------------------------------


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


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


def test_the_example_of_pack_by_hand():
    columns = Columns(advantages=floats(0.5, 0.5, 0.5, -0.5, -0.5), old=floats(-1, -2, -3, -4, -5))
    weights = floats(0.1, 0.2, 0.3, 0.4, 0.5)
    [[p]] = pack(two_sequences(), [0, 1], ranks=1, tokens_per_pack=100, columns=columns, weights=weights)
    assert p.tokens.tolist() == [1, 2, 3, 4, 5]
    assert (p.lengths, p.parent) == ([2, 2, 1], [-1, 0, 0])
    assert p.positions.tolist() == [0, 1, 2, 3, 2]
    assert p.logit_positions.tolist() == [1, 2, 3, 1, 4]
    assert p.targets.tolist() == [3, 4, 9, 5, 9]
    assert p.sequences.tolist() == [0, 0, 0, 1, 1]
    assert p.samples == [0, 1]
    assert p.columns.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert p.weights.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert p.rollout.tolist() == pytest.approx([-0.3, -0.4, -0.9, -0.5, -0.9])
    assert p.columns.old.tolist() == [-1, -2, -3, -4, -5]
    assert p.columns.ref is None


def test_the_example_of_pack_with_an_answer_of_an_environment():
    batch = two_sequences()
    first = replace(batch.samples[0], observations=(Observation(1, np.array([7], dtype=np.int32)),))
    [[p]] = pack(replace(batch, samples=[first, batch.samples[1]]), [0, 1], ranks=1, tokens_per_pack=100)
    assert p.tokens.tolist() == [1, 2, 3, 7, 4, 5]
    assert (p.lengths, p.parent) == ([2, 3, 1], [-1, 0, 0])
    assert p.targets.tolist() == [3, 4, 9, 5, 9]
    assert p.logit_positions.tolist() == [1, 3, 4, 1, 5]
    assert (p.turn_counts, p.first_logit) == ([1, 2, 2], [1, 3, 1])
    assert (p.target_counts, p.places.tolist()) == ([3, 2], [0, 0, 1, 0, 1])


def test_what_opens_all_episodes_of_a_group_is_computed_once():
    """Three samples of a row without a prompt: two begin with 1 2, one with 8."""
    opened = [[1, 2], [8], [1, 2]]
    samples = [
        Sample(
            "", i, "", np.array([3 + i, 9], dtype=np.int32), np.zeros(2, dtype=np.float32), "stop", 1, (), (opening,)
        )
        for i, opening in enumerate(Observation(0, np.array(tokens, dtype=np.int32)) for tokens in opened)
    ]
    batch = Batch(
        [Prompt("p", "", "", [], {})], samples, np.zeros(3, dtype=int), np.zeros(3, dtype=np.float32), [{}] * 3
    )
    [[p]] = pack(batch, range(3), ranks=1, tokens_per_pack=100)
    assert p.tokens.tolist() == [1, 2, 3, 5, 8, 4]
    assert (p.lengths, p.parent) == ([2, 1, 1, 2], [-1, 0, 0, -1])
    assert (p.samples, p.targets.tolist()) == ([0, 1, 2], [3, 9, 4, 9, 5, 9])
    assert p.logit_positions.tolist() == [1, 2, 4, 5, 1, 3]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)))), min_size=1),
    st.booleans(),
)
def test_own_tokens_are_predicted_from_all_that_was_before_them(episodes, share):
    """Each episode is a list of turns: so many tokens of the environment, then so many of the model. All tokens differ."""
    numbers = iter(range(1, 10_000))
    prompts = [Prompt(f"p{g}", "", "", [next(numbers) for _ in range(1 + g)], {}) for g in range(3)]
    samples, sequences = [], []
    for group, turns in episodes:
        own, observations, sequence = [], [], list(prompts[group].tokens)
        for answered, written in turns:
            answer, turn = [next(numbers) for _ in range(answered)], [next(numbers) for _ in range(written)]
            if answer:  # after an empty turn too
                observations.append(Observation(len(own), np.array(answer, dtype=np.int32)))
                sequence += answer
            own += turn
            sequence += turn
        tokens = np.array(own, dtype=np.int32)
        samples.append(Sample("", 0, "", tokens, -tokens.astype(np.float32), "stop", 1, (), tuple(observations)))
        sequences.append(sequence)
    count = len(samples)
    groups = np.array([group for group, _ in episodes])
    batch = Batch(prompts, samples, groups, np.zeros(count, dtype=np.float32), [{}] * count)
    before = {token: sequence[:i] for sequence in sequences for i, token in enumerate(sequence)}
    targets = []
    for p in (p for rank in pack(batch, range(count), ranks=2, tokens_per_pack=30, share_prompts=share) for p in rank):
        starts = np.cumsum([0, *p.lengths])
        parts = [p.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
        whole: list[list[int]] = []
        for part, up in zip(parts, p.parent, strict=True):
            whole.append((whole[up] if up >= 0 else []) + part)
        for target, position in zip(p.targets.tolist(), p.logit_positions.tolist(), strict=True):
            piece = int(np.searchsorted(starts, position, side="right")) - 1
            seen = len(whole[piece]) - len(parts[piece]) + position - starts[piece] + 1
            assert whole[piece][:seen] == before[target]
            targets.append(target)
        assert p.rollout.tolist() == [-t for t in p.targets.tolist()]
    assert sorted(targets) == sorted(t for s in samples for t in s.tokens.tolist())


def test_without_sharing_each_sequence_is_one_piece():
    [[p]] = pack(two_sequences(), [0, 1], ranks=1, tokens_per_pack=100, share_prompts=False)
    assert p.tokens.tolist() == [1, 2, 3, 4, 1, 2, 5]
    assert (p.lengths, p.parent) == ([4, 3], [-1, -1])
    assert p.logit_positions.tolist() == [1, 2, 3, 5, 6]


def test_only_the_members_are_packed():
    batch = make_batch([0, 1, 0, 1], [0, 0, 1, 1], lengths=[2, 3, 4, 5])
    columns = Columns(advantages=np.repeat(floats(1, 2, 3, 4), [2, 3, 4, 5]))
    [[p]] = pack(batch, [1, 2], ranks=1, tokens_per_pack=100, columns=columns, weights=np.ones(7, dtype=np.float32))
    assert p.samples == [1, 2]
    assert p.weights.tolist() == [1] * 7
    assert p.columns.advantages.tolist() == [2.0] * 3 + [3.0] * 4


def test_a_sample_of_weight_0_is_left_out():
    batch = make_batch([0, 1, 0], [0, 0, 1], lengths=[2, 3, 4])
    weights = np.repeat(floats(1, 0, 1), [2, 3, 4])
    columns = Columns(old=np.repeat(floats(-1, -2, -3), [2, 3, 4]))
    [[p]] = pack(batch, [0, 1, 2], ranks=1, tokens_per_pack=100, columns=columns, weights=weights)
    assert p.samples == [0, 2]
    assert p.weights.tolist() == [1] * 6
    assert p.columns.old.tolist() == [-1] * 2 + [-3] * 4


def test_a_mini_batch_without_samples_becomes_empty_packs():
    none = np.zeros(0, dtype=np.float32)
    packs = pack(
        make_batch([0], [0]), [], ranks=2, tokens_per_pack=10, columns=Columns(advantages=floats(0, 0, 0)), weights=none
    )
    assert [len(rank_packs) for rank_packs in packs] == [1, 1]
    assert all(p.samples == [] and p.lengths == [1] and len(p.weights) == 0 for rank_packs in packs for p in rank_packs)


def test_an_empty_pack_has_the_same_columns_as_the_others():
    batch = make_batch([0], [0])
    packs = pack(batch, [0], ranks=3, tokens_per_pack=10, columns=Columns(old=floats(0, 0, 0)))
    assert sum(p.samples == [] for rank_packs in packs for p in rank_packs) == 2
    assert all(p.columns.old is not None and p.columns.ref is None for rank_packs in packs for p in rank_packs)


BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda rows: make_batch(
        [0.0] * len(rows),
        [g for g, _ in rows],
        [n for _, n in rows],
        [1 + (g * 2) % 5 for g in range(max(g for g, _ in rows) + 1)],
    )
)


@given(BATCHES, st.integers(1, 3), st.integers(1, 40))
def test_every_token_is_packed_once_with_its_own_numbers(batch, ranks, budget):
    members = list(range(len(batch.samples)))
    advantages = np.arange(batch.lengths.sum(), dtype=np.float32)
    columns, weights = Columns(advantages=advantages, ref=-advantages), advantages + 1
    packs = pack(batch, members, ranks=ranks, tokens_per_pack=budget, columns=columns, weights=weights)

    assert len(packs) == ranks
    assert len({len(rank_packs) for rank_packs in packs}) == 1, "every rank has the same number of packs"
    flat = [p for rank_packs in packs for p in rank_packs]
    for p in flat:
        assert len(p.tokens) == sum(p.lengths)
        assert sum(p.lengths) <= budget or len(p.samples) == 1
    assert sorted(s for p in flat for s in p.samples) == members

    for read, expected in (
        (lambda p: p.weights, weights),
        (lambda p: p.columns.advantages, advantages),
        (lambda p: p.columns.ref, -advantages),
        (lambda p: p.targets, np.concatenate([s.tokens for s in batch.samples])),
        (lambda p: p.rollout, np.concatenate([s.logprobs for s in batch.samples])),
    ):
        values = unpack(packs, [[read(p) for p in rank_packs] for rank_packs in packs], len(members))
        np.testing.assert_array_equal(values, expected)


def tokens_up_to(p: Pack, position: int) -> list[int]:
    """The tokens of a sequence up to a position in the pack, that position included."""
    starts = np.cumsum([0, *p.lengths])
    piece = int(np.searchsorted(starts, position, side="right")) - 1
    front = [] if p.parent[piece] < 0 else tokens_up_to(p, int(starts[p.parent[piece] + 1]) - 1)
    return front + p.tokens[starts[piece] : position + 1].tolist()


@given(BATCHES, st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_each_target_is_predicted_by_all_that_comes_before_it(batch, ranks, budget, share):
    packs = pack(batch, range(len(batch.samples)), ranks=ranks, tokens_per_pack=budget, share_prompts=share)
    for p in (p for rank_packs in packs for p in rank_packs):
        for s, m in enumerate(p.samples):
            whole = [*batch.prompts[batch.groups[m]].tokens, *batch.samples[m].tokens]
            before = [tokens_up_to(p, place) for place in p.logit_positions[p.sequences == s]]
            assert before == [whole[:i] for i in range(len(whole) - len(before), len(whole))]
            assert p.targets[p.sequences == s].tolist() == whole[-len(before) :]
            assert [p.positions[place] for place in p.logit_positions[p.sequences == s]] == [len(b) - 1 for b in before]


@given(BATCHES)
def test_a_pack_computes_each_prompt_once(batch):
    [[p]] = pack(batch, range(len(batch.samples)), ranks=1, tokens_per_pack=1000)
    prompts = sum(len(batch.prompts[g].tokens) for g in set(batch.groups.tolist()))
    assert len(p.tokens) == prompts + int((batch.lengths - 1).sum())


@given(BATCHES, st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_packs_have_as_many_attention_pairs_as_their_cost_assumed(batch, ranks, budget, share):
    packs = pack(batch, range(len(batch.samples)), ranks=ranks, tokens_per_pack=budget, share_prompts=share)
    for p in (p for rank_packs in packs for p in rank_packs if p.samples):
        families = [int(batch.groups[m]) if share else m for m in p.samples]
        prompts = [len(batch.prompts[batch.groups[m]].tokens) for m in p.samples]
        completions = [int(batch.lengths[m]) - 1 for m in p.samples]
        assert p.pairs == pytest.approx(
            count_attention_pairs(list(map(SequenceSize, p.samples, families, prompts, completions)))
        )


def test_empty_packs_unpack_to_nothing():
    none = np.zeros(0, dtype=np.float32)
    result = unpack(
        [[empty_pack(Columns(old=none))], pack(make_batch([0], [0]), [0], ranks=1, tokens_per_pack=9)[0]],
        [[none], [floats(1, 2, 3)]],
        1,
    )
    assert result.tolist() == [1, 2, 3]


# --- the update does not depend on the packs --------------------------------------------------------------------------


def compute_update(batch: Batch, ranks: int, budget: int, normalize: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one mini-batch, summed over the packs of all ranks."""
    model = zigzag.build_model(0)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = PackedLogprobs(model, chunk=5)
    columns = Columns(
        advantages=np.repeat(np.linspace(-1, 1, len(batch.samples), dtype=np.float32), batch.lengths),
        old=np.concatenate([s.logprobs for s in batch.samples]) - np.float32(2.5),
    )
    weights = token_weights(torch.from_numpy(batch.lengths), normalize, constant=9, control_weight=0.5).numpy()
    total = 0.0
    packs = pack(
        batch,
        range(len(batch.samples)),
        ranks=ranks,
        tokens_per_pack=budget,
        columns=columns,
        weights=weights,
    )
    for p in (p for rank_packs in packs for p in rank_packs):
        logprobs, _ = packed(p)
        old, advantages = torch.as_tensor(p.columns.old), torch.as_tensor(p.columns.advantages)
        loss = ppo_clip(logprobs, old, advantages, torch.as_tensor(p.sequences))
        share = (loss * torch.as_tensor(p.weights)).sum()
        share.backward()
        total += share.item()
    return total, {name: w.grad for name, w in model.named_parameters()}


@pytest.mark.parametrize("normalize", NORMALIZERS)
@settings(max_examples=6)
@given(ranks=st.integers(1, 3), budget=st.integers(8, 70))
def test_packing_does_not_change_the_loss_nor_its_gradient(normalize, ranks, budget):
    batch = make_batch([0] * 6, [0, 0, 1, 1, 2, 2], lengths=[1, 8, 3, 5, 2, 6], prompt_lengths=[7, 1, 4])
    loss, gradients = compute_update(batch, 1, 1000, normalize)
    other_loss, other = compute_update(batch, ranks, budget, normalize)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert max(g.abs().max() for g in gradients.values()) > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
