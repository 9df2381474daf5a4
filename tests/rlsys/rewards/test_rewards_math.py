"""Where a completion's answer is found, and what a completion cannot do. Pairs of equal answers are in `math_pairs`."""

import math as numbers
from pathlib import Path

import pytest
from math_pairs import DIFFERENT, EQUAL

from rlsys.rewards.math.final_answer import final_answer
from rlsys.rewards.math.latex import normalize_latex
from rlsys.rewards.math.math_reward import math, vote_key


def score_and_answer(reward):
    """Score and answer."""
    return float(reward), reward.answer


def score(completion: str, answer: object, **options: bool) -> float:
    return math(completion, answer, **options)


@pytest.mark.parametrize(("boxed", "answer"), EQUAL)
def test_equal_answers_are_equal(boxed, answer):
    assert score(f"So the answer is $\\boxed{{{boxed}}}$.", answer) == 1


@pytest.mark.parametrize(("boxed", "answer"), DIFFERENT)
def test_different_answers_are_different(boxed, answer):
    assert score(f"So the answer is $\\boxed{{{boxed}}}$.", answer) == 0


# --- where the answer stands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{1}\n\nno wait\n\n\\boxed{4}", "4"),  # the last box counts
        ("\\boxed{4} because 2 + 2 = 4, as in step 7.", "4"),  # and text after it does not
        ("\\boxed{\\boxed{4}}", "4"),
        ("\\boxed{4} I hope \\boxed{} is filled.", "4"),  # an empty box does not count
        ("\\boxed 4", "4"),
        ("$\\boxed4$", "4"),
        ("\\boxed 2.5.", "2.5"),
        ("\\boxed 4\\text{ cm}", "4"),
        ("\\boxed{4}, as \\fbox{5} is a frame", "4"),
        ("\\fbox{4}", "4"),
        ("$\\boxed{-2}$ and $\\boxed{1}$", "1, -2"),  # joined boxes are one answer
        ("$\\boxed{1}$, $\\boxed{2}$, or $\\boxed{3}$", "1, 2, 3"),
        ("$\\boxed{4}$, that is $\\boxed{4}$", "4"),
        ("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}"),
        ("\\boxed{\\{1, 2\\}}", "1,2"),
        ("<think>\\boxed{5}?</think> It is \\boxed{4}.", "4"),
        ("She has 2 + 2 = <<2+2=4>>4.\n#### 4", "4"),
        ("<answer>4</answer>", "4"),
        ("The answer is 4.", "4"),
        ("The answer is -4.", "-4"),
        ("**Answer:** 4 apples", "4"),
        ("The answer is **4**.", "4"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "0.5"),
        ("Final Answer: The volume of $ABC$ is 12. I hope it is correct.", "12"),
        ("The answer is (B).", "B"),
        ("The answer is Monday.", "\\text{Monday}"),
        ("Answer: 10 apples, since 5 + 5 = 10.", "10"),
        ("the answer is $\\frac{2}{4}$", "\\frac{1}{2}"),
        ("Therefore the length is $3\\sqrt{2}$ units.", "3\\sqrt{2}"),
        ("Janet makes $18 every day.", "18"),
        ("So the probability is 1/2.", "0.5"),
        ("The answer is √10.", "\\sqrt{10}"),
        ("It costs 1,234 dollars.", "1234"),
        ("The answer is 1,234 dollars.", "1234"),
        ("The area is 12 cm^2.", "12"),
        ("(1,2)", "(1,2)"),
        ("x = 3", "3"),
        ("\\frac{1}{2}", "0.5"),
        ("It is 18.", "18"),
        ("So 18.", "18"),
        ("It's 18.", "18"),
        ("so it is 1/2.", "0.5"),
        ("It is 3 km.", "3"),
        ("The answer is 0.333....", "1/3"),
        ("It costs 3 million dollars in all.", "3000000"),
        ("So it is 2\\sqrt{13}.", "2\\sqrt{13}"),
        ("9 + 9 is 18.\n\nSo it is 18.", "18"),
        ("So the side is √10.", "\\sqrt{10}"),
        ("That makes 10⁵ in all.", "10^5"),
        ("The answer is exactly 18.", "18"),
        ("The answer is exactly $\\pi$.", "\\pi"),
        ("The answer is therefore 5.", "5"),
        ("The answer is 18 in total", "18"),
        ("The answer is 12 (see above).", "12"),
        ("The answer is 1/3 of the cake.", "1/3"),
        ("The answer is 5 million people.", "5000000"),
        ("The answer is 5 cm long.", "5 cm"),
        ("The answer is 3 and 5.", "3, 5"),
        ("The answer is ab + 2.", "2 + ab"),
        ("The answer is 18!", "18"),
        ("The answer is 18! I hope it is correct.", "18"),
        ("The answer is $5!$.", "120"),
        ("5!", "120"),
        ("The answer is May 5.", "May 5"),
        ("所以一共是18元。", "18"),
        ("答案：18", "18"),
        ("答えは18です。", "18"),
        ("Ответ: 18.", "18"),
        ("#### 18 元", "18"),
        ("The answer is \u200b18\u200b.", "18"),
        ("So it makes \u200e18\u200e.", "18"),
        ("#### 18\n\nI hope this helps.", "18"),
        ("#### 18 apples\n\nI hope this helps.", "18"),
        ("#### $\\pi$\nDone.", "\\pi"),
        ("#### 18 in total", "18"),
        ("#### Monday", "Monday"),
        # Four marks are a heading too.
        ("#### Step 1: add\n9+9 = 18\n\n#### Final Answer\n18", "18"),
        ("### Steps\n#### 1. Add the numbers\nNine plus nine is 18.\n\nThe answer is 18.", "18"),
        ("#### Final Answer: 18", "18"),
        ("#### Final Answer\n\\frac{1}{2}", "0.5"),
        ("#### Answer\n\n**18**", "18"),
        ("#### Conclusion\n\nSo it costs 18 dollars.", "18"),
        ("**18**", "18"),
        ("#### **18**", "18"),
        ("<answer>**18**</answer>", "18"),
    ],
)
def test_the_final_answer_is_found_where_people_write_it(completion, answer):
    assert score(completion, answer) == 1


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{4}\n\nno wait\n\n\\boxed{1}", "4"),
        ("$\\boxed{1}$ or $\\boxed{2}$", "2"),
        ("$\\boxed{1}$, or maybe $\\boxed{2}$", "2"),
        ("\\boxed{1}, \\boxed{2}, \\boxed{3}, \\boxed{4}", "4"),
        ("It is 4, and not \\boxed{5}.", "4"),
        ("The answer is 4. No: the answer is 5.", "4"),
        ("I do not know", "4"),
        ("AZ4B", "4"),
        ("#### Step 4\nThe answer is 5.", "4"),
        ("#### 4. Add\n\nThe answer is 5.", "4"),
        ("#### 4\n#### 5", "4"),
        ("It is 4xy.", "4"),
        ("1, 2, 3, ...", "1, 2, 3"),
        ("The answer is 1, 2, 3, ....", "1, 2, 3"),
        ("It costs 4 million dollars in all.", "4"),
        ("一共是4万元。", "4"),
        ("Это 4 миллиона", "4"),
        ("4 миллиона", "4"),
        ("So 4\\sqrt{13}", "13"),
        ("So the side is √10.", "10"),
        ("That makes 10⁵ in all.", "10"),
        ("The answer is ab + 4.", "4"),
        ("The answer is 4 million people.", "4"),
        ("The answer is May 4.", "4"),
        ("The answer is twice 4.", "4"),
        ("The answer is negative 4.", "4"),
        ("The answer is less than 4.", "4"),
        ("The answer is 4 or less.", "4"),
        ("The answer is 4 and a half.", "4"),
        ("The answer is 3 mod 4.", "4"),
        ("The answer is 3 and 4.", "4"),
        ("The answer is sin 4.", "4"),
        ("The answer is $4!$.", "4"),
        ("The answer is n!", "n"),
        ("答案是负4", "4"),
        ("答案是根号4", "4"),
        ("一共是14元。", "4"),
        ("", "4"),
        ("\\boxed{}", "4"),
        ("\\boxed", "4"),
        ("Put it in \\boxed{...}", "4"),
    ],
)
def test_text_outside_the_final_answer_does_not_count(completion, answer):
    assert score(completion, answer) == 0


def test_with_boxed_only_nothing_but_a_box_counts():
    assert score("\\boxed{4}", "4", boxed_only=True) == 1
    assert score_and_answer(math("The answer is 4.", "4", boxed_only=True)) == (0.0, "")


def test_a_long_text_is_searched_at_its_end_for_an_answer_without_a_box():
    assert score("The answer is 5. " + "Hmm. " * 5000 + "The answer is 4.", "4") == 1


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        4,
        4.0,
        "4",
        " 4 ",
        "$4$",
        "\\boxed{4}",
        "#### 4",
        "so $x = \\boxed{4}$.",
        "$\\frac{8}{2}$",
        ["4"],
        "\\text{4}",
        "x = 4",
    ],
)
def test_a_reference_may_be_written_in_many_ways(answer):
    assert score("\\boxed{4}", answer) == 1
    assert score("\\boxed{5}", answer) == 0


def test_all_references_of_a_list_are_required():
    assert score("\\boxed{3, 2}", ["2", "3"]) == 1
    assert score("\\boxed{2}", ["2", "3"]) == 0


@pytest.mark.parametrize("answer", [None, "", "  ", "$$", "\u200b", "\\boxed{}", "#### ", []])
def test_a_row_without_a_reference_fails_instead_of_scoring_0(answer):
    with pytest.raises(ValueError, match="nothing to compare with"):
        math("\\boxed{4}", answer)


def test_a_reference_without_mathematics_is_compared_as_text():
    assert score("\\boxed{\\text{The  Moon}}", "the moon") == 1
    assert score("\\boxed{\\text{The sun}}", "the moon") == 0
    assert score("\\boxed{\\foo{1}{x}}", "\\foo{1}{ x}") == 1
    assert score("\\boxed{x +}", "x +") == 1
    assert score("\\boxed{x -}", "x +") == 0


# --- votes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "voted"),
    [
        (["42", "42.0", "$42$", "42 \\text{ cm}", "\\$42", "x = 42", "\\text{42 cm}", "**42**", "≈ 42", "42元"], "42"),
        (["√16", "\\mathbf{4}"], "4"),
        (["\\frac\\pi2", "\\mathbf{\\frac{\\pi}{2}}"], "pi/2"),
        (["\\frac{1}{2}", "0.5", "\\frac{2}{4}", "1/2"], "1/2"),
        (["28\\%", "28"], "28"),
        (["3, 1", "1 \\text{ and } 3", "\\{1,3\\}", "x=3 \\text{ or } x=1"], "1, 3"),
        (["(1,2)", "( 1, 2.0 )"], "(1, 2)"),
        (["[1,2)"], "[1, 2)"),
        (["\\sqrt{8}", "2\\sqrt{2}"], "2*sqrt(2)"),
        (["(x+1)^2", "x^2+2x+1"], "x**2 + 2*x + 1"),
        (["(1+\\sqrt{2})^9", "(1+\\sqrt{2})^8(1+\\sqrt{2})"], "1393 + 985*sqrt(2)"),
        (["\\text{(B)}", "B", "(B) 12"], "B"),
        (["\\text{Evelyn}", "evelyn"], "evelyn"),
        (["2,5"], "2, 5"),
        (["1,234"], "1234"),
    ],
)
def test_equal_answers_give_one_vote(texts, voted):
    assert {vote_key(normalize_latex(text)) for text in texts} == {voted}


def test_a_wrong_answer_votes_too():
    assert score_and_answer(math("\\boxed{\\frac{2}{6}}", "4")) == (0.0, "1/3")


# --- what may not be achieved -----------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "9^{9^{9^9}}",
        "(9^{99})^{9999}",
        "100000000!",
        "((9!)!)!",
        "e^{e^{e^{e^{10}}}}",
        "(1+x)^{1000000}",
        "(a+b+c)^{2000}",
        "(a+b)(c+d)(f+g)(h+j)(k+l)(m+n)(o+p)(q+r)(s+t)(u+v)(w+y)(z+A)(B+C)(D+F)(G+H)(K+L)",
        "(a+b+c+d+f+g+h+k+l+m)^{19}",
        "\\sin((a+b+c+d+f+g+h+k+l+m)^{-19})",
        "(a+b+c+d+f+g+h+k+l+m)^{n+19}",
        "((a+b+c)^9+d)^9",
        "\\begin{pmatrix}(a+b+c+d+f+g+h+k+l+m)^{19} & 1\\end{pmatrix}",
        "\\binom{1000000}{500000}",
        "\\sum_{n=1}^{10^9} n",
        "1/0",
        "\\frac{0}{0}",
        "0^{-1}",
        "\\infty",
        "\\infty-\\infty",
        "\\log(\\log(0))",
        "\\tan 90^\\circ",
        "(" * 500 + "1" + ")" * 499,
        "\\frac{1}{" * 30 + "3" + "}" * 30,
        "\\sqrt{" * 30 + "2" + "}" * 30,
        "1+" * 5000,
        "9" * 100_000,
        "-" * 3000,
        "|" * 50 + "x" + "|" * 50,
        "\\text{" * 5000,
        "\\begin{pmatrix}" * 500,
        ",".join(map(str, range(5000))),
        "1,2," * 8,
        "\\pm 1" * 12,
        "$" * 20_000,
        "\\[" * 20_000,
        "\\ " * 50_000,
        "\\boxed{" * 5000,
        "\\boxed{}" * 5000,
        "answer is " * 5000,
        "\x00",
        "\ud800",
        "²",
        "=" * 1000,
        "1e999",
        "\\alpha" * 150 + "5 = 3",
        "x_{1}'" * 150 + "5 = 3",
        "\\text{ a}" * 100 + "5 = 3",
        "\\boxed{1}" + "\\text{  " * 200 + "x" + "}" * 200 + "\\boxed{2}",
        "1 " * 400 + "x",
        "1.2" * 300 + "...",
    ],
)
def test_any_completion_is_judged_quickly_and_never_raises(text):
    for completion in (text, f"\\boxed{{{text}}}"):
        for answer in ("17", "x^2+1", "y", "f(x)", "(1,2)", "x > 5", "\\text{Evelyn}"):
            assert score(completion, answer) == 0


@pytest.mark.parametrize("quote", ["", "\\text"])
def test_nothing_in_a_completion_is_run_as_code(tmp_path: Path, quote):
    file = tmp_path / "made"
    for code in (f"__import__('os').system('touch {file}')", f"open('{file}', 'w')", f"exec(\"open('{file}', 'w')\")"):
        for answer in ("12345678987654321", "none"):  # no number of the path
            assert score(f"\\boxed{{{quote}{{{code}}}}}", answer) == 0
            assert score(code, answer) == 0
    assert not file.exists()


def test_infinity_is_equal_to_itself_only():
    assert score("\\boxed{\\infty}", "\\infty") == 1
    assert score("\\boxed{+\\infty}", "∞") == 1
    assert score("\\boxed{-\\infty}", "\\infty") == 0
    assert score("\\boxed{\\infty}", 10**30) == 0


def test_a_float_reference_is_the_number_it_prints():
    assert score("\\boxed{0.3}", 0.1 + 0.2) == 1
    assert score("\\boxed{100000000000000000000}", 1e20) == 1
    with pytest.raises(ValueError, match="nothing to compare with"):
        math("\\boxed{4}", numbers.nan)


def test_the_final_answer_is_given_as_it_is_written():
    assert final_answer("... so $x = \\boxed{\\frac{1}{2}}$.") == "\\frac{1}{2}"
    assert final_answer("nothing at all, to be honest, and I mean it") == ""
