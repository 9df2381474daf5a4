"""The weights of a loss's tokens. Samples that cannot move the policy are dropped, and the update stays the same."""

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from fakes import make_batch, make_config

from rlsys.algorithms.losses import LOSSES
from rlsys.batching.minibatches import (
    MiniBatch,
    draw_by_tokens,
    drop_zero_advantage,
    left_out,
    loss_weights,
    weigh_other_terms,
)
from rlsys.types import Columns

LENGTHS = [2, 3, 1, 2]  # of samples 0 to 3, of which 1 and 2 have no advantage
ADVANTAGES = np.repeat(np.float32([1, 0, 0, -1]), LENGTHS)


def columns(**more) -> Columns:
    return replace(Columns(advantages=ADVANTAGES), **more)


def test_the_weights_of_first_tokens_are_those_of_control_tokens_alone(tmp_path):
    batch = make_batch([1, 0, 1], [0, 0, 0], lengths=[3, 2, 2])
    samples = [replace(s, tokens=np.array([t, *s.tokens[1:]])) for s, t in zip(batch.samples, [20, 21, 5], strict=True)]
    batch = replace(batch, samples=samples)
    options = ["algorithm.normalize=decoupled", "algorithm.control_weight=0.5"]
    weights = loss_weights(make_config(tmp_path, *options), batch, [0, 1, 2], {20: 1.0, 21: 0.5})
    assert weights.tolist() == pytest.approx([0.5 / 3, 1 / 6, 1 / 6, 0.5 / 3, 1 / 3, 1 / 6, 1 / 6])
    weights = loss_weights(make_config(tmp_path, *options), batch, [2, 0])
    assert weights.tolist() == pytest.approx([0.25, 0.5, 0.25, 0.25, 0.25]), "without names, every first token is one"


def test_decoupled_weighs_other_terms_as_means_over_sequences(tmp_path):
    batch, columns = make_batch([1, 0, 1], [0, 0, 1], lengths=[3, 2, 2]), Columns(ref=np.zeros(7, np.float32))
    config = make_config(tmp_path, "algorithm.normalize=decoupled")
    weights = weigh_other_terms(config, batch, [0, 2], columns).term_weights
    assert weights.tolist() == pytest.approx([1 / 6] * 3 + [0] * 2 + [1 / 4] * 2)
    assert weigh_other_terms(config, batch, [0, 2], Columns()).term_weights is None, "the policy loss is alone"
    assert weigh_other_terms(make_config(tmp_path), batch, [0, 2], columns) is columns


def test_a_sample_that_ended_at_any_limit_can_be_left_out(tmp_path):
    ends = ["stop", "length", "turns", "tokens", "window"]
    batch = make_batch([1, 0, 1, 0, 1], [0] * 5, lengths=[2, 1, 1, 1, 1])
    batch = replace(batch, samples=[replace(s, finish=end) for s, end in zip(batch.samples, ends, strict=True)])
    options = ["overlong.mask=true", "algorithm.normalize=token_mean"]
    weights = loss_weights(make_config(tmp_path, *options), batch, [0, 1, 2, 3, 4])
    assert weights.tolist() == [0.5, 0.5, 0, 0, 0, 0]


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
    held = zeros.copy()
    held[5] = 1  # the token of sample 2
    assert drop(columns(old_kl_coef=held))[0] == [0, 2]
    assert drop(columns(ref=zeros))[0] == [0, 1, 2]
    assert drop(columns(), "entropy.coef=0.01")[0] == [0, 1, 2]
    assert drop(columns(), f"algorithm.loss={tmp_path}/mine.py:mine")[0] == [0, 1, 2]


def test_a_mini_batch_may_lose_all_its_samples(drop):
    kept, mini = drop(columns(advantages=np.zeros_like(ADVANTAGES)))
    assert (kept, mini.zero_advantage_samples) == ([], 3)


# Two sequences, with log-ratios to the old policy and an advantage each.
LOG_RATIOS, SEQUENCE_ADVANTAGES = [[0.5, -0.25], [0.125, 0.0, -0.5, 0.25, 0.0625]], [1.0, -0.5]


def published_gspo(log_ratios: list[float], advantage: float) -> float:
    """min(s A, clip(s, 0.9997, 1.0004) A) with s = (π(y) / old(y))^(1/|y|).  arXiv 2507.18071, eq. 5 and 7"""
    s = math.exp(sum(log_ratios)) ** (1 / len(log_ratios))
    return min(s * advantage, min(max(s, 1 - 3e-4), 1 + 4e-4) * advantage)


def published_gmpo(log_ratios: list[float], advantage: float) -> float:
    """(Π |min(r A, clip(r, e^-0.4, e^0.4) A)|)^(1/|y|) sgn A.  arXiv 2507.20673, eq. 4"""
    factors = [min(math.exp(x) * advantage, math.exp(min(max(x, -0.4), 0.4)) * advantage) for x in log_ratios]
    return math.copysign(math.prod(map(abs, factors)) ** (1 / len(factors)), advantage)


def published_sapo(log_ratios: list[float], advantage: float) -> float:
    """1/|y| Σ 4/τ σ(τ (r - 1)) A, τ = 1 for A > 0 and 1.05 for A < 0.  arXiv 2511.20347, eq. 5 and 6"""
    tau = 1.0 if advantage > 0 else 1.05
    return fmean(4 / tau / (1 + math.exp(-tau * (math.exp(x) - 1))) * advantage for x in log_ratios)


@pytest.mark.parametrize(
    ("loss", "published"), [("gspo", published_gspo), ("gmpo", published_gmpo), ("sapo", published_sapo)]
)
def test_gspo_gmpo_and_sapo_are_means_over_sequences_by_default(tmp_path, loss, published):
    lengths = [len(ratios) for ratios in LOG_RATIOS]
    sequences = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    log_ratios = torch.tensor([x for ratios in LOG_RATIOS for x in ratios])
    losses = LOSSES[loss](
        log_ratios - 2, torch.full_like(log_ratios, -2), torch.tensor(SEQUENCE_ADVANTAGES)[sequences], sequences
    )
    batch = make_batch([1, 0], [0, 0], lengths)
    weights = loss_weights(make_config(tmp_path, f"algorithm.loss={loss}"), batch, [0, 1])
    expected = -fmean(published(*sequence) for sequence in zip(LOG_RATIOS, SEQUENCE_ADVANTAGES, strict=True))
    assert float(losses @ torch.from_numpy(weights)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["ppo_clip", "advantage_clip", "cispo", "dppo_tv", "reinforce"])
def test_the_other_losses_are_means_over_tokens_by_default(tmp_path, loss):
    config = make_config(tmp_path, f"algorithm.loss={loss}", "trainer.updates_per_step=1")
    assert loss_weights(config, make_batch([1, 0], [0, 0], [2, 6]), [0, 1]).tolist() == [0.125] * 8


def test_samples_are_drawn_as_often_as_they_have_tokens():
    lengths, rng = np.array([1, 4, 2, 9, 30, 2]), np.random.default_rng(0)
    draws = [draw_by_tokens(lengths, 1 / 3, rng) for _ in range(4000)]
    assert {len(drawn) for drawn in draws} == {2}
    shares = np.bincount(np.concatenate(draws), minlength=6) / 8000
    assert shares.tolist() == pytest.approx((lengths / lengths.sum()).tolist(), abs=0.01)
    assert draw_by_tokens(np.array([3]), 1 / 16, rng) == [0], "at least one"


def test_left_out_samples_are_those_with_tokens_of_no_weight(tmp_path):
    batch = make_batch([1, 0, 0, 1], [0, 0, 1, 1], lengths=[2, 0, 3, 1])
    mini = MiniBatch(0, [0, 1, 2, 3], np.float32([0, 0.5, 0, 0, 0, 1]))
    assert left_out(batch, mini) == [2]
