import pytest

from rlsys.rewards.shape import length, repetition


@pytest.mark.parametrize(("tokens", "score"), [(0, 1), (10, 1), (15, 0.5), (18, 0.2), (20, 0), (99, 0)])
def test_length_falls_linearly_between_its_bounds(tokens, score):
    assert length("ignored", tokens, at_most=10, zero_at=20) == pytest.approx(score)
    assert length("ignored", tokens, at_most=10) == pytest.approx(score)


def test_length_may_count_characters():
    assert length("abcdef", 99, at_most=4, zero_at=8, by="characters") == 0.5


@pytest.mark.parametrize(
    ("completion", "ngram", "penalty"),
    [
        ("a b c d", 2, 0),
        ("a b a b", 2, -1 / 3),  # ab ba ab: one of three is a repetition
        ("A b a B", 2, -1 / 3),
        ("a a a a a", 2, -3 / 4),
        ("a a a", 1, -2 / 3),
        ("a b", 3, 0),  # too short to repeat anything
        ("", 2, 0),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(completion, ngram, penalty):
    assert repetition(completion, ngram=ngram) == pytest.approx(penalty)
    assert repetition(completion, ngram=ngram, max_penalty=-0.5) == pytest.approx(penalty / 2)


def test_repetition_may_count_characters():
    assert repetition("哈哈哈哈", ngram=2, by="characters") == pytest.approx(-2 / 3)
    assert repetition("哈哈哈哈", ngram=2) == 0


def test_repetition_is_quick_for_a_long_text():
    assert repetition("a " * 100_000) == pytest.approx(-1, abs=1e-4)
