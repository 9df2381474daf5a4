"""The suite of six small tasks: right answers, and nothing held out that is shown or trained on."""

import re
from collections import Counter

import pytest

from rlsys.tasks import basics

ROWS = {name: basics.rows(name) for name in ("basics", "basics_heldout")}
PLURALS = {  # as a dictionary has them
    "dog": "dogs",
    "bus": "buses",
    "church": "churches",
    "city": "cities",
    "boy": "boys",
    "leaf": "leaves",
    "knife": "knives",
    "woman": "women",
    "foot": "feet",
    "tooth": "teeth",
    "goose": "geese",
    "mouse": "mice",
    "child": "children",
    "ox": "oxen",
    "hero": "heroes",
}


def question(row):
    return row["prompt"].rpartition("\n")[2]


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


def rows_of(task):
    return [row for rows in ROWS.values() for row in rows if row["source"] == task]


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("max", lambda asked: str(sorted(numbers(asked))[1])),
        ("add", lambda asked: str(sum(numbers(asked)))),
        ("letter", lambda asked: chr(ord(asked.removesuffix(" ->")[-1]) + 1)),
        ("sort", lambda asked: re.sub(r"\B", " ", "".join(c for c in "123456789" if c in asked))),
    ],
)
def test_answers_are_right(task, answer):
    assert rows_of(task)
    assert all(row["answer"] == answer(question(row)) for row in rows_of(task))


def test_plurals_are_right():
    answers = {asked.removesuffix(" ->"): answer for asked, answer in basics.plural()}
    assert {noun: answers[noun] for noun in PLURALS} == PLURALS
    assert len(answers) == len(list(basics.plural()))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (20, "twenty"),
        (42, "forty-two"),
        (100, "one hundred"),
        (306, "three hundred and six"),
        (719, "seven hundred and nineteen"),
        (999, "nine hundred and ninety-nine"),
    ],
)
def test_numbers_are_written_in_words(number, words):
    assert basics.in_words(number) == words
    assert (f"{words} =", str(number)) in list(basics.digits())


@pytest.mark.parametrize("task", basics.TASKS)
def test_nothing_held_out_is_shown_or_trained_on_in_any_order(task):
    train, held_out = ([question(row) for row in rows if row["source"] == task] for rows in ROWS.values())
    assert train
    assert held_out
    words = [{tuple(sorted(re.findall(r"\w+", asked))) for asked in side} for side in (train, held_out)]
    assert not words[0] & words[1]
    shown = rows_of(task)[0]["prompt"].splitlines()[:-1]
    assert not [asked for asked in train + held_out if any(line.startswith(asked + " ") for line in shown)]


def test_every_prompt_shows_examples_of_its_own_task_with_right_answers():
    for task, answers in {name: dict(questions()) for name, questions in basics.TASKS.items()}.items():
        [shown] = {tuple(row["prompt"].splitlines()[:-1]) for row in rows_of(task)}
        assert len(shown) >= 2
        for line in shown:
            mark = max(line.find("="), line.find("->") + 1) + 1
            assert answers.get(line[:mark], line[mark + 1 :]) == line[mark + 1 :]
    assert answers


def test_rows_are_always_the_same_and_never_repeat():
    assert {name: basics.rows(name) for name in ROWS} == ROWS
    prompts = Counter(row["prompt"] for rows in ROWS.values() for row in rows)
    assert set(prompts.values()) == {1}
    held_out = Counter(row["source"] for row in ROWS["basics_heldout"])
    assert held_out == {"max": 64, "add": 64, "letter": 46, "plural": 28, "sort": 64, "digits": 64}
