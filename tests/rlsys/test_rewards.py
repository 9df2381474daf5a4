import math

import pytest

from rlsys.config import ConfigError
from rlsys.rewards import REWARDS, Judge
from rlsys.rewards.functions import arithmetic
from rlsys.types import Verdict

FACTS = {"prompt": "2+2=", "completion": "4", "finish": "stop", "source": "sums", "answer": "4", "level": 3}


def judge(tmp_path, source: str, weight: float = 1.0, facts: dict | None = None) -> Verdict:
    """The verdict of a user's function `f`."""
    file = tmp_path / "mine.py"
    file.write_text(source)
    return Judge({f"{file}:f": weight})(facts or FACTS)


# --- built-ins -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("completion", "score"), [("4", 1), (" 4\n", 1), ("4.", 0), ("", 0), ("44", 0)])
def test_exact_compares_texts_but_for_blanks_at_the_ends(completion, score):
    assert REWARDS["exact"](completion, "4") == score
    assert REWARDS["exact"](completion, 4) == score


@pytest.mark.parametrize(("completion", "score"), [("it is 4.", 1), ("44", 1), ("four", 0)])
def test_contains_looks_for_the_answer(completion, score):
    assert REWARDS["contains"](completion, " 4 ") == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("the answer is $\\frac{2}{4}$", "\\frac{1}{2}", 1),
        ("\\boxed{3}", "4", 0),
        ("I do not know", "4", 0),
        ("\\boxed{1}\n\nno wait\n\n\\boxed{4}", "\\boxed{4}", 1),
    ],
)
def test_math_compares_values_and_not_texts(completion, answer, score):
    assert REWARDS["math"](completion, answer) == score


@pytest.mark.parametrize(
    ("completion", "finish", "score"),
    [
        ("481625", "stop", 1),
        ("184256", "stop", 0),  # 2 < 5 < 6
        ("481625", "length", 0),  # right, but did not end
        ("481620", "stop", 0),  # other digits
        ("48162", "stop", 0),  # not all digits
        ("", "stop", 0),
    ],
)
def test_zigzag_wants_the_same_digits_rising_and_falling_by_turns(completion, finish, score):
    assert REWARDS["zigzag"]("864152>", completion, finish) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>(1 + 2) * 8</answer>", 1),
        ("<think>1*2*8?</think>\n<answer>\n8*(2+1)\n</answer>\nDone.", 1),
        ("<answer>1*2*8</answer> no: <answer>(1+2)*8</answer>", 1),
        ("<answer>(1+2)*8</answer> no: <answer>1*2*8</answer>", 0),  # the last one counts
        ("<answer>(1+2)*8 = 24</answer>", 1),
        ("<answer>(1+2)*8 = 25</answer>", 0),
        ("<answer>24 = (1+2)*8</answer>", 0),
        ("<answer>=(1+2)*8</answer>", 0),
        ("<answer>24</answer>", 0),  # uses none of the numbers
        ("<answer></answer>\n(1+2)*8", 0),  # an answer that says nothing is the answer
        ("(1+2)*8</answer>", 0),
        ("<answer>(1+2)*8", 0),
        ("I try 1*2*8 first.\n(1+2)*8\n\nThat is it.", 1),
        ("(1+2)*8\n1*2*8", 0),
        ("(1+2)*8 = 24\n", 1),
        ("Answer: (1+2)*8", 0),
        ("", 0),
        ("\n", 0),
    ],
)
def test_countdown_reads_the_last_answer_or_the_last_line_that_is_an_expression(completion, score):
    assert REWARDS["countdown"](completion, [1, 2, 8], 24) == score


@pytest.mark.parametrize(
    ("expression", "numbers", "target", "score"),
    [
        ("8/(3-8/3)", [3, 3, 8, 8], 24, 1),  # through fractions, exactly
        ("1/3+1/3+1/3", [1, 1, 1, 3, 3, 3], 1, 1),
        ("1/3*3", [1, 3, 3], 1, 1),
        ("7/2", [2, 7], 3, 0),
        ("3-8", [3, 8], -5, 1),
        ("-3+8", [3, 8], 5, 1),
        ("--8", [8], 8, 1),
        ("3+3", [3, 3], 6, 1),
        ("3+3", [3], 6, 0),
        ("3*2", [3, 3], 6, 0),
        ("3", [3, 3], 3, 0),
        ("33", [3, 3], 33, 0),
        ("1/0", [0, 1], 1, 0),
        ("0/(2-2)", [0, 2, 2], 0, 0),
        ("0*8", [0, 8], 0, 1),
    ],
)
def test_countdown_wants_each_number_once_and_the_exact_value(expression, numbers, target, score):
    assert REWARDS["countdown"](f"<answer>{expression}</answer>", numbers, target) == score
    assert REWARDS["countdown"](expression, numbers, target) == score


@pytest.mark.parametrize(
    "text",
    [
        "2**3",
        "9//2",
        "9%2",
        "2^3",
        "2 3",
        "2(3)",
        "(2)(3)",
        "2,3",
        "(2,3)",
        "()",
        "+2",
        "2.0",
        "2e1",
        "1_0",
        "0x10",
        "010",
        "True",
        "abs(-2)",
        "__import__('os').system('true')",
        "(lambda: 2)()",
        "[2][0]",
        "'2'",
        "2 if 1 else 3",
        "2;3",
        "2 #3",
        "２+３",
        "٢",
        "2×3",
        "2\x00",
        "2\n+3",
        "(" * 50,
        "-" * 100,
    ],
)
def test_countdown_takes_nothing_for_an_expression_that_is_not_plain_arithmetic(text):
    with pytest.raises(SyntaxError):
        arithmetic(text)
    assert REWARDS["countdown"](f"<answer>{text}</answer>", [2, 3], 5) == 0
    assert REWARDS["countdown"](f"2+3\n<answer>{text}</answer>", [2, 3], 5) == 0


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "completion",
    [
        "9" * 1_000_000,
        "<answer>" * 100_000,
        "</answer>" * 100_000,
        "((((9\n" * 10_000,
        f"<answer>{'9*' * 100_000}9</answer>",
        f"<answer>{'(' * 5000}9{')' * 5000}</answer>",
        f"<answer>{'-' * 5000}9</answer>",
        "*".join(["9" * 19] * 10),
        "(" * 90 + "9" + ")" * 90 + "-" * 10 + "9",
    ],
)
def test_countdown_is_soon_done_with_whatever_it_gets(completion):
    assert REWARDS["countdown"](completion, [9], 24) == 0


def test_countdown_fails_where_the_row_makes_no_sense():
    facts = FACTS | {"completion": "1+2", "numbers": ["one", "two"], "target": 3}
    assert Judge({"countdown": 1.0})(facts).failure == "exception"
    assert Judge({"countdown": 1.0})(facts | {"numbers": [1, 2], "target": "three"}).failure == "exception"
    assert Judge({"countdown": 1.0})(FACTS).detail.startswith("countdown: ConfigError: it asks for numbers, target")
    assert Judge({"countdown": 1.0})(facts | {"numbers": ["1", 2.0], "target": "3"}).score == 1.0


# --- the judge -------------------------------------------------------------------------------------------------------------


def test_a_verdict_is_the_weighted_sum_and_keeps_its_parts():
    verdict = Judge({"exact": 2.0, "contains": 0.5})(FACTS)
    assert verdict == Verdict(2.5, {"exact": 1.0, "contains": 1.0})


def test_a_function_gets_what_it_asks_for(tmp_path):
    assert judge(tmp_path, "def f(prompt, completion, level): return len(prompt) + int(completion) + level").score == 11


def test_a_function_may_take_everything(tmp_path):
    assert judge(tmp_path, "def f(**facts): return len(facts)").score == len(FACTS)
    assert judge(tmp_path, "def f(level, **rest): return level * ('level' not in rest)").score == 3


def test_a_field_with_a_default_may_be_missing(tmp_path):
    assert judge(tmp_path, "def f(completion, bonus=0.25): return bonus").score == 0.25


def test_a_missing_field_is_named_with_the_ones_there(tmp_path):
    verdict = judge(tmp_path, "def f(completion, solution): return 1")
    assert verdict.score is None
    assert verdict.failure == "exception"
    assert "asks for solution" in verdict.detail
    assert "answer, completion, finish, level, prompt, source" in verdict.detail


def test_named_components_are_added_up_and_kept(tmp_path):
    verdict = judge(tmp_path, "def f(): return {'form': 0.25, 'content': 0.5}", weight=2.0)
    assert verdict == Verdict(1.5, {"f/form": 0.25, "f/content": 0.5})


def test_an_async_function_is_awaited(tmp_path):
    source = "import asyncio\nasync def f(completion):\n    await asyncio.sleep(0)\n    return int(completion)"
    assert judge(tmp_path, source).score == 4


def test_truth_values_are_numbers(tmp_path):
    assert judge(tmp_path, "def f(): return True").score == 1.0


@pytest.mark.parametrize(
    "error", ["ValueError('no')", "KeyError('no')", "SystemExit(3)", "KeyboardInterrupt('no')", "RecursionError('no')"]
)
def test_whatever_a_function_raises_is_a_failed_verdict(tmp_path, error):
    verdict = judge(tmp_path, f"def f(): raise {error}")
    assert verdict.score is None
    assert verdict.failure == "exception"
    assert f"f: {error.partition('(')[0]}" in verdict.detail
    assert "mine.py" in verdict.detail, "the traceback leads into the user's file"


def test_an_error_after_the_first_await_is_a_failed_verdict(tmp_path):
    assert judge(tmp_path, "async def f(): raise OSError('gone')").failure == "exception"


@pytest.mark.parametrize(
    "value",
    [
        "float('nan')",
        "float('inf')",
        "-float('inf')",
        "None",
        "'good'",
        "[1.0]",
        "10 ** 400",
        "{'part': None}",
        "{'part': 1e999}",
        "object()",
    ],
)
def test_what_is_not_a_finite_number_is_a_failed_verdict(tmp_path, value):
    verdict = judge(tmp_path, f"def f(): return {value}")
    assert verdict.score is None
    assert verdict.failure == "invalid"
    assert verdict.detail.startswith("f")


def test_a_value_that_raises_when_asked_for_its_number_is_a_failed_verdict(tmp_path):
    source = "class Odd:\n    def __float__(self): raise RuntimeError('no')\ndef f(): return Odd()"
    assert judge(tmp_path, source).failure == "invalid"


def test_one_failed_function_fails_the_sample_whatever_the_others_say(tmp_path):
    (tmp_path / "mine.py").write_text("def f(): return float('nan')")
    verdict = Judge({"exact": 1.0, f"{tmp_path}/mine.py:f": 0.0})(FACTS)
    assert verdict.score is None


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    assert judge(tmp_path, "import numpy\ndef f(): return numpy.float32(0.5)").score == 0.5
    assert isinstance(judge(tmp_path, "import numpy\ndef f(): return numpy.float32(0.5)").score, float)


def test_a_file_that_cannot_be_imported_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="NameError"):
        judge(tmp_path, "undefined_name")


def test_unknown_names_and_missing_files_are_configuration_errors():
    with pytest.raises(ConfigError, match="Built in: contains, countdown, exact, math, zigzag"):
        Judge({"exakt": 1.0})
    with pytest.raises(ConfigError, match="does not exist"):
        Judge({"no_such_file.py:f": 1.0})


def test_a_judge_survives_a_failure(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(level): return 1 / level")
    judge = Judge({f"{file}:f": 1.0})
    assert judge(FACTS | {"level": 0}).failure == "exception"
    assert math.isclose(judge(FACTS | {"level": 4}).score, 0.25)
