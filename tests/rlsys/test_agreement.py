"""The agreement of engines and policy, as measured at the start of a run."""

import math

import numpy as np
import pytest
from fakes import FakePolicy, FakeRollout, make_batch, make_config, make_dataset

from rlsys.agreement import (
    MAX_COMPLETION_TOKENS,
    Agreement,
    measure_agreement,
    mismatch_limit,
    step_mismatch_limit,
)


def make_agreement(policy: list[float], allowed: float = 1e-3) -> Agreement:
    """Two samples of two tokens and one token, with rollout log-probs -1, -2 and -3."""
    batch = make_batch([0, 0], [0, 1], [2, 1])
    for sample, logprobs in zip(batch.samples, ([-1, -2], [-3]), strict=True):
        sample.logprobs[:] = logprobs
    return Agreement(batch, np.array(policy, dtype=np.float32), allowed)


def test_mean_and_largest_gap_are_over_tokens():
    measured = make_agreement([-1, -2.5, -2.75])
    assert (measured.mean, measured.largest, measured.tokens) == (0.25, 0.5, 3)
    assert measured.event_fields() == {"mean": 0.25, "largest": 0.5, "tokens": 3, "limit": 1e-3}


def test_agreement_is_a_sentence():
    assert str(make_agreement([-1, -2, -3])) == "rollout and policy agree: mean 0, largest 0 over 3 tokens"
    assert str(make_agreement([-1, -2.5, -2.75])) == (
        "rollout and policy disagree: mean 0.25, largest 0.5 over 3 tokens; the mean may be 0.001"
    )


def test_a_gap_up_to_the_limit_passes_and_nan_does_not():
    assert make_agreement([-1, -2.5, -2.75], allowed=0.25).within_limit
    assert not make_agreement([-1, -2.5, -2.75], allowed=0.2).within_limit
    assert not make_agreement([-1, math.nan, -3]).within_limit
    assert not make_agreement([-1, -math.inf, -3]).within_limit


@pytest.mark.parametrize(
    ("overrides", "at_start", "in_a_step"),
    [
        ((), 1e-3, 1e-3),
        (("rollout.dtype=bfloat16",), 0.1, 0.1),
        (("policy.dtype=bfloat16",), 0.1, 0.1),
        (("pipeline.max_lag=1",), 1e-3, 0.5),
        (("algorithm.anchor=rollout",), 1e-3, 0.5),  # its second update has changed weights
        (("algorithm.anchor=rollout", "trainer.updates_per_step=1"), 1e-3, 1e-3),
        (("algorithm.anchor=rollout", "entropy.control=clip_cov"), 1e-3, 1e-3),  # old log-probs are there
        (("policy.dtype=bfloat16", "pipeline.max_lag=1"), 0.1, 0.5),
        (("trainer.max_mismatch=0.02", "pipeline.max_lag=1"), 0.02, 0.02),
    ],
)
def test_the_limit_follows_from_dtype_and_lag_unless_it_is_set(tmp_path, overrides, at_start, in_a_step):
    config = make_config(tmp_path, *overrides)
    assert mismatch_limit(config) == at_start
    assert step_mismatch_limit(config) == in_a_step


def test_prompts_are_sampled_as_in_the_run_and_scored_by_all_ranks(tmp_path):
    config, events = make_config(tmp_path, "rollout.temperature=0.5"), list[str]()
    rollout = FakeRollout(events)
    policy = FakePolicy(events, rollout)
    policy.weight = 0.25
    prompts = make_dataset().take(0, 5)
    measured = measure_agreement(rollout, policy, prompts, config)
    [requests] = rollout.requests
    assert [(r.uid, r.index) for r in requests] == [(p.uid, 0) for p in prompts]
    assert {(r.temperature, r.max_new_tokens) for r in requests} == {(0.5, 7)}
    assert [s.uid for s in measured.batch.samples] == [p.uid for p in prompts], "in the order of the prompts"
    assert measured.mean == pytest.approx(0.25), "what the fake policy adds to the engine's log-probs"
    assert events == ["generating", "generate", "score"], "engines whose weights are there are not put to sleep"


def test_the_samples_are_the_same_at_every_start(tmp_path):
    config, events = make_config(tmp_path), list[str]()
    rollout = FakeRollout(events)
    for _ in range(2):
        measure_agreement(rollout, FakePolicy(events, rollout), make_dataset().take(0, 3), config)
    first, second = rollout.requests
    assert [r.seed for r in first] == [r.seed for r in second]
    assert len({r.seed for r in first}) == 3


def test_long_completions_are_truncated(tmp_path):
    config, events = make_config(tmp_path, "rollout.max_new_tokens=5000", "policy.tokens_per_pack=6000"), list[str]()
    rollout = FakeRollout(events)
    measure_agreement(rollout, FakePolicy(events, rollout), make_dataset().take(0, 2), config)
    assert {r.max_new_tokens for r in rollout.requests[0]} == {MAX_COMPLETION_TOKENS}
