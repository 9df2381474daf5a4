"""Intervals and tests of significance."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.evaluation import significance
from rlsys.evaluation.significance import bootstrap_interval, mcnemar_test, sign_flip_test

DIFFERENCES = st.lists(st.integers(-3, 3), min_size=1, max_size=8)


# --- intervals -------------------------------------------------------------------------------------------------------------


def test_an_interval_equals_that_of_all_resamples_if_they_are_few():
    values = [0.0, 0.5, 1.0, 4.0]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=4)]
    low, high = bootstrap_interval(values, seed=0, level=0.8, resamples=50_000)
    assert low == pytest.approx(np.percentile(means, 10), abs=1e-9)
    assert high == pytest.approx(np.percentile(means, 90), abs=1e-9)


def test_an_interval_of_many_prompts_is_two_standard_errors_wide():
    values = np.random.default_rng(1).random(2000)
    low, high = bootstrap_interval(values, seed=0)
    error = 1.96 * values.std() / math.sqrt(2000)
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.05 * error)


def test_prompts_are_resampled_and_not_their_samples():
    """A hundred samples of each of ten prompts, alike within a prompt, tell as much as ten."""
    solved = np.repeat([1.0] * 5 + [0.0] * 5, 100).reshape(10, 100)
    low, high = bootstrap_interval(solved.mean(axis=1), seed=0)
    assert (low, high) == pytest.approx((0.2, 0.8))


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    intervals = [bootstrap_interval((rng.random(60) < 0.4).astype(float), seed=i, resamples=500) for i in range(300)]
    assert 0.9 < np.mean([low <= 0.4 <= high for low, high in intervals]) < 0.98


def test_several_metrics_have_the_intervals_of_each_without_missing_values():
    rng = np.random.default_rng(0)
    a, b = rng.random(50), rng.random(50)
    b[::3] = np.nan
    both = bootstrap_interval(np.stack([a, b, np.full(50, np.nan)], axis=1), seed=7)
    assert both.shape == (3, 2)
    assert both[0] == pytest.approx(bootstrap_interval(a, seed=7))
    assert both[1, 0] < np.nanmean(b) < both[1, 1]
    assert both[1, 1] - both[1, 0] > both[0, 1] - both[0, 0], "fewer prompts say less"
    assert np.isnan(both[2]).all()


def test_the_seed_decides_and_chunks_do_not(monkeypatch):
    values = np.random.default_rng(0).random(40)
    whole = bootstrap_interval(values, seed=3).tolist()
    assert whole == bootstrap_interval(values, seed=3).tolist() != bootstrap_interval(values, seed=4).tolist()
    monkeypatch.setattr(significance, "CHUNK", 4000)
    assert bootstrap_interval(values, seed=3).tolist() == whole


def test_prompts_that_are_all_alike_have_an_interval_of_no_width():
    assert bootstrap_interval([1.0, 1.0], seed=0).tolist() == [1, 1]


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="at least one prompt"):
        bootstrap_interval([], seed=0)


# --- tests -----------------------------------------------------------------------------------------------------------------


@given(DIFFERENCES)
def test_a_few_differences_are_flipped_in_all_ways(differences):
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    exact = np.mean([abs(s) >= abs(sum(differences)) for s in sums])
    assert sign_flip_test(np.array(differences) / 7, seed=0) == pytest.approx(exact)


@given(st.integers(0, 15), st.integers(0, 5), st.integers(0, 30))
def test_greedy_answers_that_are_right_or_wrong_have_one_p_value(won, lost, tied):
    assert sign_flip_test([1.0] * won + [-1.0] * lost + [0.0] * tied, seed=0) == pytest.approx(mcnemar_test(won, lost))


def test_mcnemar_by_hand():
    assert mcnemar_test(5, 0) == 2 / 32
    assert mcnemar_test(4, 1) == mcnemar_test(1, 4) == 12 / 32
    assert mcnemar_test(3, 3) == mcnemar_test(0, 0) == 1
    assert mcnemar_test(1200, 1000) == pytest.approx(2.2e-5, rel=0.05)


def test_drawn_flips_agree_with_all_of_them(monkeypatch):
    differences = np.random.default_rng(2).normal(0.4, 1, 18)
    exact = sign_flip_test(differences, seed=0)
    monkeypatch.setattr(significance, "MAX_EXACT_DIFFERENCES", 10)
    assert 0.01 < exact < 0.5
    assert sign_flip_test(differences, seed=0) == pytest.approx(exact, abs=0.005)
    monkeypatch.setattr(significance, "CHUNK", 5000)
    assert sign_flip_test(differences, seed=0) == pytest.approx(exact, abs=0.005)


def test_no_difference_is_no_evidence_and_a_large_one_is_never_certain():
    assert sign_flip_test([], seed=0) == sign_flip_test([0.0, 0.0], seed=0) == 1
    assert sign_flip_test([1.0] * 200, seed=0, draws=999) == 0.001


def test_equal_models_are_told_apart_as_rarely_as_the_p_value_says():
    rng = np.random.default_rng(0)
    p_values = [sign_flip_test(rng.normal(0, 1, 30), seed=i, draws=500) for i in range(300)]
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.09
