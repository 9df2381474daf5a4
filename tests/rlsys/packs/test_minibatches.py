"""Samples that cannot move the policy are dropped, and the update stays the same."""

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
def drop(tmp_path):
    """`drop(columns, *overrides)`: which of the samples 0, 1 and 2 keep their weights, and the mini-batch."""

    def run(scored: Columns, *overrides: str) -> tuple[list[int], MiniBatch]:
        config, batch = make_config(tmp_path, *overrides), make_batch([1, 0, 0, 1], [0, 0, 1, 1], LENGTHS)
        members = [0, 1, 2]
        mini = MiniBatch(0, members, loss_weights(config, batch, members))
        after = drop_zero_advantage(config, batch, mini, scored)
        parts = np.split(after.weights, np.cumsum(LENGTHS[:3])[:-1])
        kept = [m for m, weights_of_sample in zip(members, parts, strict=True) if weights_of_sample.any()]
        untouched = np.split(mini.weights, np.cumsum(LENGTHS[:3])[:-1])
        assert all(parts[m].tolist() == untouched[m].tolist() for m in kept)
        assert after.zero_advantage_samples == 3 - len(kept)
        return kept, after

    return run


def test_samples_without_an_advantage_are_dropped_and_others_keep_weights(drop):
    kept, mini = drop(columns())
    assert kept == [0]
    assert mini.weights.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 0, 0])


def test_one_token_with_an_advantage_is_enough(drop):
    advantages = ADVANTAGES.copy()
    advantages[3] = 0.5
    assert drop(columns(advantages=advantages))[0] == [0, 1]


def test_samples_that_move_the_policy_otherwise_are_kept(drop, tmp_path):
    (tmp_path / "mine.py").write_text("def mine(logprobs, old, advantages, sequences): return -logprobs\n")
    zeros = np.zeros_like(ADVANTAGES)
    anchor = zeros.copy()
    anchor[5] = 1  # the token of sample 2
    assert drop(columns(anchor=anchor))[0] == [0, 2]
    assert drop(columns(ref=zeros))[0] == [0, 1, 2]
    assert drop(columns(), "entropy.coef=0.01")[0] == [0, 1, 2]
    assert drop(columns(), f"algorithm.loss={tmp_path}/mine.py:mine")[0] == [0, 1, 2]


def test_a_mini_batch_may_lose_all_its_samples(drop):
    kept, mini = drop(columns(advantages=np.zeros_like(ADVANTAGES)))
    assert (kept, mini.zero_advantage_samples) == ([], 3)
