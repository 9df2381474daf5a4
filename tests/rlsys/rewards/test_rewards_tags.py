import pytest

from rlsys.rewards.tags import format


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>\na\nb\n</think>\n\n<answer>\nc\n</answer>\n", 1),
        (" <think>1 < 2</think> <answer>x</answer> ", 1),
        ("<think>a</think><answer>b</answer>.", 0),
        ("So: <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a<answer>b</answer>", 0),
        ("a</think><answer>b</answer>", 0),
        ("<Think>a</Think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_requires_each_tag_once_in_order_and_nothing_outside(completion, score):
    assert format(completion) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("a</think><answer>b</answer>", 1),
        ("\na\n</think>\n<answer>b</answer>", 1),
        ("<think>a</think><answer>b</answer>", 0),  # the prompt has opened it already
        ("a<answer>b</answer>", 0),
    ],
)
def test_format_accepts_a_prompt_that_opens_the_first_tag(completion, score):
    assert format(completion, opened=True) == score


def test_tags_may_have_other_names():
    assert format("<reasoning>a</reasoning><solution>b</solution>", think="reasoning", answer="solution") == 1
    assert format("<|t|>a</|t|><answer>b</answer>", think="|t|") == 1


@pytest.mark.parametrize(
    ("completion", "score"), [("<think>a</think>b", 1), ("<think>a</think>\n ", 0), ("b", 0), ("x<think>a</think>b", 0)]
)
def test_without_an_answer_tag_some_text_must_follow_the_thought(completion, score):
    assert format(completion, answer="") == score


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text", ["<think>" * 50_000, " " * 200_000, "<think>" + "</think " * 50_000, "<think></think>" + " " * 100_000]
)
def test_format_is_quick_for_any_text(text):
    assert format(text) == 0
    assert format(text, answer="") == 0
