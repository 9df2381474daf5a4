"""Samples that cannot move the policy are not computed, and the update is the same without them."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config

from rlsys.packs.minibatches import MiniBatch, drop_zero_advantage, loss_weights
from rlsys.types import Columns

LENGTHS = [2, 3, 1, 2]  # of samples 0 to 3, of which 1 and 2 have no advantage
ADVANTAGES = np.repeat(np.float32([1, 0, 0, -1]), LENGTHS)


def columns(**more) -> Columns:
    return replace(Columns(advantages=ADVANTAGES), **more)


@pytest.fixture
def left(tmp_path):
    """`left(columns, *overrides)`: which of samples 0, 1 and 2 are still heard, and the mini-batch."""

    def run(found: Columns, *overrides: str) -> tuple[list[int], MiniBatch]:
        config, batch = make_config(tmp_path, *overrides), make_batch([1, 0, 0, 1], [0, 0, 1, 1], LENGTHS)
        members = [0, 1, 2]
        mini = MiniBatch(0, members, loss_weights(config, batch, members))
        after = drop_zero_advantage(config, batch, mini, found)
        parts = np.split(after.weights, np.cumsum(LENGTHS[:3])[:-1])
        kept = [m for m, own in zip(members, parts, strict=True) if own.any()]
        untouched = np.split(mini.weights, np.cumsum(LENGTHS[:3])[:-1])
        assert all(parts[m].tolist() == untouched[m].tolist() for m in kept)
        assert after.zero_advantage_samples == 3 - len(kept)
        return kept, after

    return run


def test_samples_without_an_advantage_are_left_out_and_the_others_weigh_what_they_did(left):
    kept, mini = left(columns())
    assert kept == [0]
    assert mini.weights.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 0, 0])


def test_one_token_with_an_advantage_is_enough(left):
    some = ADVANTAGES.copy()
    some[3] = 0.5
    assert left(columns(advantages=some))[0] == [0, 1]


def test_what_else_moves_the_policy_keeps_them(left, tmp_path):
    (tmp_path / "own.py").write_text("def mine(logprobs, old, advantages, sequences): return -logprobs\n")
    zeros = np.zeros_like(ADVANTAGES)
    anchor = zeros.copy()
    anchor[5] = 1  # the token of sample 2
    assert left(columns(anchor=anchor))[0] == [0, 2]
    assert left(columns(ref=zeros))[0] == [0, 1, 2]
    assert left(columns(), "entropy.coef=0.01")[0] == [0, 1, 2]
    assert left(columns(), f"algorithm.loss={tmp_path}/own.py:mine")[0] == [0, 1, 2]


def test_a_mini_batch_may_have_nothing_to_say(left):
    kept, mini = left(columns(advantages=np.zeros_like(ADVANTAGES)))
    assert (kept, mini.zero_advantage_samples) == ([], 3)
