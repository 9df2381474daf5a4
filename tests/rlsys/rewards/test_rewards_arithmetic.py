import pytest

from rlsys.rewards.arithmetic import countdown, evaluate_arithmetic


def score(completion: str, numbers: list, target) -> float:
    return countdown(completion, numbers, target)


@pytest.mark.parametrize(
    ("completion", "right"),
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
        ("<answer></answer>\n(1+2)*8", 0),  # an empty answer is the answer
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
def test_countdown_reads_the_last_answer_tag_or_expression_line(completion, right):
    assert score(completion, [1, 2, 8], 24) == right


@pytest.mark.parametrize(
    ("expression", "numbers", "target", "right"),
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
def test_countdown_requires_each_number_once_and_the_exact_value(expression, numbers, target, right):
    assert score(f"<answer>{expression}</answer>", numbers, target) == right
    assert score(expression, numbers, target) == right


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
def test_countdown_accepts_plain_arithmetic_only(text):
    with pytest.raises(SyntaxError):
        evaluate_arithmetic(text)
    assert score(f"<answer>{text}</answer>", [2, 3], 5) == 0
    assert score(f"2+3\n<answer>{text}</answer>", [2, 3], 5) == 0


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
def test_countdown_is_quick_for_any_text(completion):
    assert score(completion, [9], 24) == 0


def test_countdown_fails_where_the_row_makes_no_sense():
    with pytest.raises(ValueError, match="invalid literal"):
        countdown("1+2", ["one", "two"], 3)
    with pytest.raises(ValueError, match="Invalid literal"):
        countdown("1+2", [1, 2], "three")
    assert score("1+2", ["1", 2.0], "3") == 1


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>(1 + 2) * 8 = 24</answer>", "(1+2)*8"),
        ("1*2*8", "1*2*8"),
        ("<answer>1/0</answer>", ""),
        ("no idea", ""),
    ],
)
def test_countdown_votes_for_the_expression_without_blanks(completion, answer):
    assert countdown(completion, [1, 2, 8], 24).answer == answer
