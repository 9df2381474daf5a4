"""What is measured at the start of a run."""

import math

import numpy as np
import pytest
from fakes import FakePolicy, FakeRollout, make_batch, make_config, make_dataset

from rlsys.numerics.agreement import (
    MAX_COMPLETION_TOKENS,
    Agreement,
    measure_agreement,
    mismatch_limit,
    step_mismatch_limit,
)


def agreement(policy: list[float], allowed: float = 1e-3) -> Agreement:
    """Of two samples with two tokens and one, whose log-probs the engine says are -1, -2 and -3."""
    batch = make_batch([0, 0], [0, 1], [2, 1])
    for sample, logprobs in zip(batch.samples, ([-1, -2], [-3]), strict=True):
        sample.logprobs[:] = logprobs
    return Agreement(batch, np.array(policy, dtype=np.float32), allowed)


def test_mean_and_largest_gap_are_over_tokens():
    found = agreement([-1, -2.5, -2.75])
    assert (found.mean, found.largest, found.tokens) == (0.25, 0.5, 3)
    assert found.event_fields() == {"mean": 0.25, "largest": 0.5, "tokens": 3, "limit": 1e-3}


def test_agreement_is_a_sentence():
    assert str(agreement([-1, -2, -3])) == "rollout and policy agree: mean 0, largest 0 over 3 tokens"
    assert str(agreement([-1, -2.5, -2.75])) == (
        "rollout and policy disagree: mean 0.25, largest 0.5 over 3 tokens; the mean may be 0.001"
    )


def test_a_gap_up_to_the_limit_is_fine_and_one_that_is_no_number_is_not():
    assert agreement([-1, -2.5, -2.75], allowed=0.25).within_limit
    assert not agreement([-1, -2.5, -2.75], allowed=0.2).within_limit
    assert not agreement([-1, math.nan, -3]).within_limit
    assert not agreement([-1, -math.inf, -3]).within_limit


@pytest.mark.parametrize(
    ("overrides", "at_start", "in_a_step"),
    [
        ((), 1e-3, 1e-3),
        (("rollout.dtype=bfloat16",), 0.1, 0.1),
        (("policy.dtype=bfloat16",), 0.1, 0.1),
        (("pipeline.max_lag=1",), 1e-3, 0.5),
        (("policy.dtype=bfloat16", "pipeline.max_lag=1"), 0.1, 0.5),
        (("trainer.max_mismatch=0.02", "pipeline.max_lag=1"), 0.02, 0.02),
    ],
)
def test_the_limit_follows_from_dtype_and_lag_unless_it_is_said(tmp_path, overrides, at_start, in_a_step):
    config = make_config(tmp_path, *overrides)
    assert mismatch_limit(config) == at_start
    assert step_mismatch_limit(config) == in_a_step


def test_a_few_prompts_are_sampled_as_the_run_samples_and_scored_by_all_ranks(tmp_path):
    config, events = make_config(tmp_path, "rollout.temperature=0.5"), list[str]()
    rollout = FakeRollout(events)
    policy = FakePolicy(events, rollout)
    policy.weight = 0.25
    prompts = make_dataset().take(0, 5)
    found = measure_agreement(rollout, policy, prompts, config)
    [requests] = rollout.requests
    assert [(r.uid, r.index) for r in requests] == [(p.uid, 0) for p in prompts]
    assert {(r.temperature, r.max_new_tokens) for r in requests} == {(0.5, 7)}
    assert [s.uid for s in found.batch.samples] == [p.uid for p in prompts], "in the order of the prompts"
    assert found.mean == pytest.approx(0.25), "what the fake policy adds to the engine's log-probs"
    assert events == ["generating", "generate", "score"], "and engines whose weights are there are not put to sleep"


def test_the_samples_are_always_the_same_and_no_sample_of_a_step(tmp_path):
    config, events = make_config(tmp_path), list[str]()
    rollout = FakeRollout(events)
    for _ in range(2):
        measure_agreement(rollout, FakePolicy(events, rollout), make_dataset().take(0, 3), config)
    first, second = rollout.requests
    assert [r.seed for r in first] == [r.seed for r in second]
    assert len({r.seed for r in first}) == 3


def test_long_completions_are_cut(tmp_path):
    config, events = make_config(tmp_path, "rollout.max_new_tokens=5000", "policy.tokens_per_pack=6000"), list[str]()
    rollout = FakeRollout(events)
    measure_agreement(rollout, FakePolicy(events, rollout), make_dataset().take(0, 2), config)
    assert {r.max_new_tokens for r in rollout.requests[0]} == {MAX_COMPLETION_TOKENS}
