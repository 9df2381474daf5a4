"""Converters of public data sets: a row in, a question out."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.tools.convert.converters import (
    BOXED,
    CONVERTERS,
    Question,
    countdown,
    dapo,
    deepscaler,
    gsm8k,
    last_boxed,
    math,
)
from rlsys.rewards import REWARDS

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    '(without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line after "Answer:".'
)


def test_an_answer_of_gsm8k_follows_four_number_signs():
    row = {
        "question": "How many clips? ",
        "answer": "In May 48/2 = <<48/2=24>>24 clips.\nAltogether 1,072.\n#### 1,072",
    }
    assert gsm8k(row) == Question("How many clips?", "1072")
    assert gsm8k(row | {"answer": "#### $-2,125.50."}).answer == "-2125.50"


def test_math_has_its_answer_in_the_last_box():
    row = {
        "problem": "Find $x$.",
        "level": "Level 3",
        "type": "Algebra",
        "solution": "Not \\boxed{2}. So $x = \\boxed{\\frac{1}{\\sqrt{2}}}$.",
    }
    assert math(row) == Question("Find $x$.", "\\frac{1}{\\sqrt{2}}", {"level": 3, "subject": "Algebra"})
    assert math(row | {"level": "Level ?"}).facts == {"subject": "Algebra"}
    assert math({"problem": "p", "solution": "\\boxed{1}", "level": 5, "subject": "Algebra"}).facts["level"] == 5


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{5}", "5"),
        (
            "\\boxed{ {1} } is not \\boxed{\\left\\{ x : x > \\frac{1}{2} \\right\\}}",
            "\\left\\{ x : x > \\frac{1}{2} \\right\\}",
        ),
        ("\\boxed{\\text{(A)}}.", "\\text{(A)}"),
        ("\\fbox{3} then \\fbox{4}", "4"),
        ("\\boxed{3}, as \\fbox{4} is only a frame", "3"),
        ("\\framebox{4}", "4"),
        ("$\\boxed 7$", "7"),
        ("$\\boxed5$", "5"),
        ("$\\boxed 2.5$.", "2.5"),
        ("It is \\boxed 1,000, or so.", "1,000"),
        ("$\\boxed 2\\sqrt{3}$", "2\\sqrt{3}"),
        ("\\(\\boxed \\frac{\\sqrt{2}}{2}\\)", "\\frac{\\sqrt{2}}{2}"),
        ("\\boxed f(x)", "f(x)"),
        ("(\\boxed 4)", "4"),
        ("**\\boxed 4**", "4"),
        ("$\\boxed{-2}$ and $\\boxed{1}$", "-2, 1"),
        ("\\boxed{a\\\\{b}}", "a\\\\{b}"),
        ("\\boxed{1}, not \\boxed{}", "1"),
        ("\\boxed{1} and \\boxed{2", "1"),
    ],
)
def test_the_last_box_is_the_answer(text, inside):
    assert last_boxed(text) == inside


@given(
    st.recursive(st.text("ab+^ ", max_size=4), lambda t: st.lists(t, max_size=3).map(lambda p: "{" + "".join(p) + "}")),
    st.text("abc{", max_size=5),
)
def test_nested_braces_are_kept(inside, before):
    assume(inside.strip())
    assert last_boxed(f"{before} so \\boxed{{{inside}}} is it") == inside.strip()


def test_a_completion_with_the_boxes_of_the_solution_is_right():
    for solution in (
        "$\\boxed{-2}$ and $\\boxed{1}$",
        "$\\boxed 2.5$",
        "$\\boxed5$",
        "\\boxed{3}, as \\fbox{4} is a frame",
    ):
        assert REWARDS["math"](solution, last_boxed(solution)) == 1.0


def test_the_instructions_of_dapo_are_removed():
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO.format("In triangle $ABC$, find $AB$.")}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    assert dapo(row) == Question("In triangle $ABC$, find $AB$.", "34")
    assert dapo(row | {"prompt": [{"role": "user", "content": "Bare question"}]}).text == "Bare question"


def test_a_countdown_prompt_agrees_with_its_reward():
    question = countdown({"target": 98, "nums": [44, 19, 35]})
    assert question.text.startswith("Use each of the numbers 44, 19, 35 exactly once")
    assert question.text.endswith("to make 98.")
    assert question.facts == {"numbers": [44, 19, 35], "target": 98}
    assert REWARDS["countdown"]("<answer>44 + 19 + 35</answer>", **question.facts) == 1.0


def test_an_answer_of_deepscaler_is_a_field_of_its_row():
    row = {"problem": "The operation … ?", "answer": "-\\frac{2}{3}", "solution": "…"}
    assert deepscaler(row) == Question("The operation … ?", "-\\frac{2}{3}")
    assert deepscaler({"problem": "p", "answer": 204}).answer == "204"


@pytest.mark.parametrize(
    ("convert", "row", "reason"),
    [
        (gsm8k, {"question": "q", "answer": "72"}, "no `####`"),
        (gsm8k, {"question": "q", "answer": "#### "}, "empty"),
        (gsm8k, {"problem": "q"}, "`answer` is not a text; the row has problem"),
        (math, {"problem": "p", "solution": "x = 5"}, "no \\boxed{}"),
        (dapo, {"prompt": "text", "reward_model": {"ground_truth": "1"}}, "not a list of chat messages"),
        (dapo, {"prompt": [{"role": "user", "content": "q"}]}, "no `reward_model`"),
        (
            dapo,
            {"prompt": [{"role": "user", "content": DAPO.format("")}], "reward_model": {"ground_truth": "1"}},
            "empty",
        ),
        (countdown, {"target": 3}, "`nums` is not a list"),
        (countdown, {"target": None, "nums": [1, 2]}, "or `target` is none"),
        (countdown, {"target": 3, "nums": ["1", "2"]}, "`nums` is not a list"),
        (deepscaler, {"problem": "p", "answer": ""}, "empty"),
        (deepscaler, {"problem": 3, "answer": "1"}, "`problem` is not a text"),
        (deepscaler, {"problem": "p", "answer": ["3"]}, "not a text or a number; it is ['3']"),
    ],
)
def test_a_row_of_another_form_is_refused_with_a_reason(convert, row, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        convert(row)


def test_instructions_ask_for_the_form_that_the_reward_reads():
    for name in ("gsm8k", "math", "dapo", "deepscaler"):
        assert CONVERTERS[name].instruction == BOXED
    assert "<answer>" in CONVERTERS["countdown"].instruction
