import pytest

from rlsys.rewards.text import contains, exact, regex


def score_and_answer(reward):
    """Score and answer."""
    return float(reward), reward.answer


@pytest.mark.parametrize(("completion", "score"), [("4", 1), (" 4\n", 1), ("4.", 0), ("", 0), ("44", 0)])
def test_exact_compares_texts_but_for_blanks_at_the_ends(completion, score):
    assert exact(completion, "4") == score
    assert exact(completion, 4) == score


def test_exact_votes_for_what_it_compares():
    assert score_and_answer(exact(" Paris\n", "paris", ignore_case=True)) == (1.0, "paris")
    assert score_and_answer(exact(" Paris\n", "paris")) == (0.0, "Paris")


def test_exact_accepts_any_of_several_answers():
    assert exact("NYC", ["New York", "NYC"]) == 1
    assert exact("LA", ["New York", "NYC"]) == 0


@pytest.mark.parametrize(
    ("completion", "score"),
    [("<think>5?</think>4", 1), ("<think>4</think>5", 0), ("4", 0), ("5</think>6</think> 4", 1), ("4</think>", 0)],
)
def test_exact_after_a_mark_compares_the_text_after_the_last_one(completion, score):
    assert exact(completion, "4", after="</think>") == score


@pytest.mark.parametrize(("completion", "score"), [("it is 4.", 1), ("44", 1), ("four", 0)])
def test_contains_looks_for_the_answer(completion, score):
    assert contains(completion, " 4 ") == score


def test_contains_may_ignore_case_and_text_before_a_mark():
    assert contains("It is PARIS.", "Paris", ignore_case=True) == 1
    assert contains("It is PARIS.", "Paris") == 0
    assert contains("Paris?</think>Rome.", "Paris", after="</think>") == 0
    assert contains("Lyon or Paris", ["Rome", "Paris"]) == 1


@pytest.mark.parametrize("answer", [None, "", "  ", [], ["4", ""]])
def test_a_row_without_an_answer_fails_instead_of_scoring_0(answer):
    for reward in (exact, contains):
        with pytest.raises(ValueError, match="nothing to compare with"):
            reward("4", answer)
    with pytest.raises(ValueError, match="nothing to compare with"):
        regex("4", answer, pattern="(.)", group=1)


@pytest.mark.parametrize(
    ("completion", "options", "score"),
    [
        ("I say 42.", {"pattern": r"\d+"}, 1),
        ("I say nothing.", {"pattern": r"\d+"}, 0),
        ("I say 42.", {"pattern": r"\d+", "whole": True}, 0),
        ("42", {"pattern": r"\d+", "whole": True}, 1),
        ("YES", {"pattern": "yes"}, 0),
        ("YES", {"pattern": "yes", "ignore_case": True}, 1),
        ("a\nb", {"pattern": "^b"}, 0),
        ("a\nb", {"pattern": "^b", "multiline": True}, 1),
        ("a\nb", {"pattern": "a.b"}, 0),
        ("a\nb", {"pattern": "a.b", "dot_all": True}, 1),
        ("", {"pattern": "^$"}, 1),
    ],
)
def test_regex_without_a_group_requires_a_match_only(completion, options, score):
    assert regex(completion, **options) == score


@pytest.mark.parametrize(
    ("completion", "score", "expected"),
    [
        ("Answer: 4", 1, "4"),
        ("Answer: 5\nAnswer: 4", 1, "4"),  # the last one counts
        ("Answer: 4\nAnswer: 5", 0, "5"),
        ("Answer: 44", 0, "44"),
        ("4", 0, ""),
        ("Answer: ", 0, ""),
    ],
)
def test_regex_with_a_group_compares_the_last_match(completion, score, expected):
    assert score_and_answer(regex(completion, 4, pattern=r"Answer: ?(?P<n>\d*)", group="n")) == (score, expected)
    assert score_and_answer(regex(completion, "4", pattern=r"Answer: ?(\d*)", group=1)) == (score, expected)


def test_a_group_that_took_no_part_caught_nothing():
    assert score_and_answer(regex("b", "a", pattern="(a)|b", group=1)) == (0.0, "")
