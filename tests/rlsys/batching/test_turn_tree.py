"""What episodes of one prompt begin with is computed once, and nothing but the work changes."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from forked_episodes import Turns, episode, forked_batch, turn_by_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.losses import ppo_clip
from rlsys.batching.balance import count_attention_pairs, count_tokens
from rlsys.batching.packing import grow_tree, pack, sequence_size, unpack
from rlsys.forward.attention import EXACT_PACKED_ATTENTION, PACKED_ATTENTION
from rlsys.forward.exact import use_exact_linear
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.tasks import zigzag
from rlsys.types import Batch, Columns, Pack, Prompt

A, B, C = ([1], [2, 3]), ([4], [5]), ([4], [6])


def one_group(*stories: Turns, after: dict[int, int] | None = None) -> Batch:
    samples = [episode(0, i, story, after or {}) for i, story in enumerate(stories)]
    prompts = [Prompt("p", "", "", [8, 9], {})]
    zeros = np.zeros(len(samples), dtype=np.float32)
    return Batch(prompts, samples, np.zeros(len(samples), dtype=int), zeros, [{}] * len(samples))


def packs_of(batch: Batch, **options: Any) -> list[Pack]:
    options = {"ranks": 1, "tokens_per_pack": 10_000} | options
    return [p for rank in pack(batch, range(len(batch.samples)), **options) for p in rank]


def pieces(p: Pack) -> list[tuple[list[int], int]]:
    starts = np.cumsum([0, *p.lengths])
    return [
        (p.tokens[start : start + n].tolist(), up) for start, n, up in zip(starts, p.lengths, p.parent, strict=False)
    ]


def seen_before(p: Pack) -> list[list[int]]:
    """The tokens from which each target is predicted."""
    parts, starts = pieces(p), np.cumsum([0, *p.lengths])

    def whole(piece: int) -> list[int]:
        return [] if piece < 0 else whole(parts[piece][1]) + parts[piece][0]

    result = []
    for position in p.logit_positions.tolist():
        piece = int(np.searchsorted(starts, position, side="right")) - 1
        result.append(whole(parts[piece][1]) + p.tokens[starts[piece] : position + 1].tolist())
    return result


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_samples_share_what_they_begin_with_but_no_end() -> None:
    batch = one_group([A, B, C], [A, B, B], [A, C], [B, A], [A])
    tree = grow_tree(batch, range(5), [0] * 5)
    keys = [[(stem.tokens, stem.before) for stem in tree.stems(m)] for m in range(5)]
    turn_a, turn_b = [(1, 2), (2, 3)], [(1, 5), (1, 6)]  # what was said and the turn, after the prompt's two tokens
    assert keys == [[*turn_a, *turn_b, (1, 7)], [*turn_a, *turn_b, (1, 7)], [*turn_a, (1, 5)], [], [(1, 2)]]
    assert [stem.node for stem in tree.stems(0)] == [stem.node for stem in tree.stems(1)]
    alone = grow_tree(batch, range(5), range(5))
    assert [alone.stems(m) for m in range(5)] == [()] * 5


def test_pieces_are_a_tree_of_prompt_turns_and_ends() -> None:
    [p] = packs_of(one_group([([], [2, 3]), B, ([6], [5, 7])], [([], [2, 3]), B, ([6], [7, 5])], [([], [2, 3]), C]))
    assert pieces(p) == [([8, 9, 2, 3, 4], -1), ([5, 6], 0), ([5], 1), ([7], 1)]
    assert p.samples == [0, 1, 2]
    assert p.targets.tolist() == [2, 3, 5, 5, 7, 2, 3, 5, 7, 5, 2, 3, 6]
    assert p.turn_counts == [2, 1, 2, 2, 1, 2, 2, 1]
    assert p.first_logit == [1, 4, 6, 1, 4, 6, 1, 4]
    assert p.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert p.logit_positions.tolist() == [1, 2, 4, 6, 7, 1, 2, 4, 6, 8, 1, 2, 4]


def test_a_sample_may_begin_again_after_any_of_its_turns() -> None:
    """Turn 1 continues turn 0, turn 2 too, as if turn 1 had never been; turn 3 begins after the prompt."""
    story = [([], [2, 3]), ([4], [5, 6]), ([4, 1], [7]), ([1], [2, 9])]
    [p] = packs_of(one_group(story, after={2: 0, 3: -1}))
    assert pieces(p) == [([8, 9], -1), ([2, 3], 0), ([4, 5], 1), ([4, 1], 1), ([1, 2], 0)]
    assert p.targets.tolist() == [2, 3, 5, 6, 7, 2, 9]
    assert p.first_logit == [1, 4, 7, 8]
    assert [b[-1] for b in seen_before(p)] == [9, 2, 4, 5, 1, 1, 2]
    assert seen_before(p)[4] == [8, 9, 2, 3, 4, 1]


def test_single_answers_are_never_forked() -> None:
    [p] = packs_of(one_group([([], [2, 3, 4])], [([], [2, 3, 4])]))
    assert pieces(p) == [([8, 9], -1), ([2, 3], 0), ([2, 3], 0)]


# --- any trees --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000), ranks=st.integers(1, 3), budget=st.integers(10, 120), words=st.sampled_from([2, 12])
)
def test_every_own_token_is_there_once_and_predicted_from_all_before_it(
    seed: int, ranks: int, budget: int, words: int
) -> None:
    batch = forked_batch(seed, words=words)
    lengths, size = batch.lengths.tolist(), len(batch.samples)
    packs = pack(batch, range(size), ranks=ranks, tokens_per_pack=budget)
    groups = batch.groups.tolist()
    tree = grow_tree(batch, range(size), groups)
    for p in (p for rank in packs for p in rank if p.samples):
        before = seen_before(p)
        sizes = [sequence_size(batch, m, groups, tree) for m in p.samples]
        assert len(p.tokens) == count_tokens(sizes)
        assert len(p.tokens) <= budget or len(p.samples) == 1
        assert p.pairs == pytest.approx(count_attention_pairs(sizes))
        for s, m in enumerate(p.samples):
            sample, ends, expected = batch.samples[m], [list(batch.prompts[groups[m]].tokens)], []
            for (observed, own), earlier in zip(sample.turns, sample.continued_turns, strict=True):
                sequence = ends[earlier + 1] + observed.tolist()
                for token in own.tolist():
                    expected.append((token, list(sequence)))
                    sequence.append(token)
                ends.append(sequence)
            mine = zip(p.targets.tolist(), before, p.sequences == s, strict=True)
            assert [(token, seen) for token, seen, is_mine in mine if is_mine] == expected
    tokens = unpack(packs, [[p.targets for p in rank] for rank in packs], size)
    assert tokens.tolist() == [t for s in batch.samples for t in s.tokens.tolist()]
    assert sorted(m for rank in packs for p in rank for m in p.samples) == [m for m in range(size) if lengths[m]]


def model(kind: str) -> PackedLogprobs:
    lm = zigzag.build_model(0)
    lm.set_attn_implementation(kind)
    if kind == EXACT_PACKED_ATTENTION:
        use_exact_linear(lm)
    return PackedLogprobs(lm, chunk=7)


def logprobs_of(batch: Batch, scorer: PackedLogprobs, **options: Any) -> Any:
    packs = pack(batch, range(len(batch.samples)), ranks=1, **options)
    with torch.no_grad():
        return unpack(packs, [[scorer(p)[0].numpy() for p in rank] for rank in packs], len(batch.samples))


@pytest.mark.parametrize("seed", range(4))
def test_sharing_changes_no_bit_where_arithmetic_is_exact(seed: int) -> None:
    batch, scorer = forked_batch(seed, rewrites=seed % 2 / 3), model(EXACT_PACKED_ATTENTION)
    alone = logprobs_of(turn_by_turn(batch), scorer, tokens_per_pack=1000)
    for budget in (1000, 60):
        assert np.array_equal(logprobs_of(batch, scorer, tokens_per_pack=budget), alone)


def gradients(batch: Batch, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    packed, total, count = model(PACKED_ATTENTION), 0.0, int(batch.lengths.sum())
    columns = Columns(
        advantages=np.linspace(-1, 1, count, dtype=np.float32), old=np.full(count, -2.5, dtype=np.float32)
    )
    weights = np.linspace(0.1, 1, count, dtype=np.float32)
    for p in packs_of(batch, columns=columns, weights=weights, **options):
        logprobs, entropies = packed(p)
        old, advantages = torch.as_tensor(p.columns.old), torch.as_tensor(p.columns.advantages)
        loss = ppo_clip(logprobs, old, advantages, torch.as_tensor(p.sequences)) - 0.01 * entropies
        share = (loss * torch.as_tensor(p.weights)).sum()
        share.backward()
        total += share.item()
    return total, {name: w.grad for name, w in packed.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"ranks": 2, "tokens_per_pack": 70}], ids=["one pack", "many packs"])
def test_the_gradient_of_trees_is_that_of_their_paths(seed: int, options: dict[str, int]) -> None:
    batch = forked_batch(seed, words=3 if seed % 2 else 12, rewrites=seed // 2 / 5)
    loss, whole = gradients(turn_by_turn(batch))
    shared_loss, shared = gradients(batch, **options)
    assert shared_loss == pytest.approx(loss, rel=1e-5)
    scale = max(float(g.abs().max()) for g in whole.values())
    assert scale > 1e-3
    for name, gradient in whole.items():
        assert float((shared[name] - gradient).abs().max()) <= 1e-5 * scale, name


# --- how much it saves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", range(6))
def test_eight_samples_of_six_turns_compute_what_they_share_once(shared: int) -> None:
    """The first turn answers the prompt with 12 tokens; each later one has 4 of the environment and 8 of the model."""
    numbers = itertools.count(100)

    def turns(count: int) -> Turns:
        tokens = [[next(numbers) for _ in range(12)] for _ in range(count)]
        return [(turn[:4], turn[4:]) for turn in tokens]

    begin = turns(shared)
    stories = [begin + turns(6 - shared) for _ in range(8)]
    [p] = packs_of(one_group(*([([], story[0][0] + story[0][1]), *story[1:]] for story in stories)))
    prompt, one_level = 2, 2 + 8 * (6 * 12 - 1)
    assert len(p.tokens) == prompt + 12 * shared + 8 * (12 * (6 - shared) - 1)
    assert one_level / len(p.tokens) >= [1.0, 1.1, 1.4, 1.7, 2.4, 3.7][shared]
