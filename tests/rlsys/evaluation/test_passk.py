"""pass@k and maj@k against all subsets."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.evaluation import passk
from rlsys.evaluation.passk import maj_at_k, pass_at_k

ANSWERS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=9)
FLAGS = st.lists(st.booleans(), min_size=1, max_size=9)


def enumerated_pass(solved: list[bool], k: int) -> float:
    return float(np.mean([any(subset) for subset in itertools.combinations(solved, k)]))


def enumerated_vote(answers: list[str], scores: list[float], k: int) -> float:
    """Over all subsets: the score of a voter of the winning answer, whichever of the winners and voters it is."""
    accuracies = []
    for subset in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in subset)
        winners = [a for a, n in votes.items() if n == max(votes.values())]
        accuracies.append(np.mean([np.mean([scores[i] for i in subset if answers[i] == a]) for a in winners]))
    return float(np.mean(accuracies))


# --- pass@k ----------------------------------------------------------------------------------------------------------------


@given(FLAGS, st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_a_solved_sample(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    assert pass_at_k([len(solved)], [sum(solved)], k)[0] == pytest.approx(enumerated_pass(solved, k), abs=1e-12)


def test_prompts_may_have_different_numbers_of_samples():
    rates = pass_at_k([4, 2, 3, 5], [2, 1, 0, 5], 2)
    assert rates == pytest.approx([5 / 6, 1, 0, 1])


def test_pass_at_1_is_the_share_of_solved_samples():
    assert pass_at_k([8, 10, 3], [2, 7, 0], 1) == pytest.approx([0.25, 0.7, 0])


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 100), (1_000_000, 1, 1000), (5000, 2500, 3), (2000, 1, 2000)])
def test_pass_at_k_is_exact_where_factorials_would_overflow(n, c, k):
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)  # whole numbers of any size
    assert pass_at_k([n], [c], k)[0] == pytest.approx(exact, rel=1e-9)


def test_nothing_solved_is_exactly_0_and_too_few_unsolved_exactly_1():
    assert pass_at_k([64, 64, 64], [0, 33, 64], 32).tolist() == [0, 1, 1]


@pytest.mark.parametrize(("n", "c", "k"), [([4, 1], [0, 0], 2), ([4], [2], 0), ([4], [5], 2), ([4], [-1], 2)])
def test_what_has_no_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_no_prompts_have_no_figures():
    assert pass_at_k([], [], 4).shape == (0,)


# --- maj@k -----------------------------------------------------------------------------------------------------------------


@given(ANSWERS, st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    scores = data.draw(st.lists(st.floats(-2, 2), min_size=len(answers), max_size=len(answers)))
    assert maj_at_k(answers, scores, k) == pytest.approx(enumerated_vote(answers, scores, k), abs=1e-9)


def test_the_example_of_the_page():
    assert maj_at_k([7, 7, 8, 9], [1, 1, 0, 0], 3) == pytest.approx(2 / 3)
    assert pass_at_k([4], [2], 2)[0] == pytest.approx(5 / 6)


def test_a_right_majority_grows_with_k_and_a_wrong_one_shrinks():
    answers = ["a"] * 10 + ["b"] * 6
    right, wrong = [1.0] * 10 + [0.0] * 6, [0.0] * 10 + [1.0] * 6
    grows = [maj_at_k(answers, right, k) for k in (1, 4, 8, 16)]
    shrinks = [maj_at_k(answers, wrong, k) for k in (1, 4, 8, 16)]
    assert grows == sorted(grows)
    assert shrinks == sorted(shrinks, reverse=True)
    assert (grows[0], grows[-1], shrinks[0], shrinks[-1]) == (0.625, 1, 0.375, 0)


def test_equally_frequent_answers_share():
    assert maj_at_k("aabbc", [1, 1, 0, 0, 0], 5) == 0.5
    assert maj_at_k("abcd", [1, 0, 0, 0], 3) == pytest.approx(0.25)


@pytest.mark.parametrize("answers", [1, 2, 7, 200], ids=lambda n: f"{n} answers")
def test_two_hundred_samples_are_counted_and_not_drawn(answers, monkeypatch):
    monkeypatch.setattr(passk, "sampled_vote", None)
    given = [i % answers for i in range(200)]
    for k in (4, 100, 199):
        assert maj_at_k(given, [1.0] * 200, k) == pytest.approx(1, abs=1e-9)


def test_drawn_subsets_agree_with_counted_ones_and_repeat(monkeypatch):
    answers = ["a"] * 20 + ["b"] * 16 + ["c"] * 4
    scores = [1.0] * 20 + [0.25] * 16 + [0.0] * 4
    exact = maj_at_k(answers, scores, 16)
    monkeypatch.setattr(passk, "MAX_EXACT_ADDITIONS", 0)
    drawn = [maj_at_k(answers, scores, 16, seed=seed) for seed in (0, 0, 1)]
    assert drawn == pytest.approx([exact] * 3, abs=0.02)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("k", [0, 4])
def test_what_has_no_maj_at_k_is_refused(k):
    with pytest.raises(ValueError, match=rf"maj@{k} .* there are 3"):
        maj_at_k("abc", [1, 0, 0], k)
