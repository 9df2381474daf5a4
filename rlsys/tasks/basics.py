"""`builtin:basics`: six small tasks that a pretrained base model half knows, as few-shot prompts with exact answers.

    max      max(12, 7) =              12
    add      12 + 7 =                  19
    letter   f g h ->                  i
    plural   city ->                   cities
    sort     sort 7 3 9 =              3 7 9
    digits   three hundred and six =   306

Each prompt begins with its task's own examples. After two of `max`, Gemma 3 270M always takes the second number, and hardly
ever tries the first, so it could not learn. A question in another order, such as 7 + 12, is on the same side of the split:
held out, or trained on. The examples themselves are on neither.
"""

import random
import re
import string
from collections.abc import Iterator
from itertools import permutations
from typing import Any

Question = tuple[str, str]  # a question and its answer

TRAIN_ROWS, HELD_OUT_ROWS = 256, 64  # of each task, where it has as many questions
HELD_OUT_SHARE = 0.25  # of the questions
EXAMPLES = {
    "max": "max(12, 7) = 12\nmax(3, 45) = 45\nmax(81, 60) = 81\nmax(5, 9) = 9\n",
    "add": "3 + 14 = 17\n12 + 9 = 21\n",
    "letter": "c d e -> f\nM -> N\np q -> r\n",
    "plural": "cat -> cats\nbaby -> babies\n",
    "sort": "sort 3 2 9 = 2 3 9\nsort 2 8 7 = 2 7 8\nsort 8 9 6 = 6 8 9\nsort 7 4 1 = 1 4 7\n",
    "digits": "forty-two = 42\nthree hundred and six = 306\n",
}

TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
S = (
    "dog cat house tree book car table chair window river garden flower teacher doctor farmer driver key day boy toy "
    "horse bird cow road street bridge school hand finger shoe shirt spoon cup plate letter number picture"
)
ES = (
    "box fox bus glass class dress kiss church match watch beach bench brush dish wish bush tax peach sandwich witch "
    "branch lunch boss cross potato tomato hero echo"
)
IES = (
    "baby city lady party story puppy berry country family army body copy cherry fairy lorry penny pony spy sky fly "
    "daisy diary enemy jelly factory battery memory library"
)
NOUNS = {  # by what is cut off at the end, and what takes its place
    ("", "s"): S,
    ("", "es"): ES,
    ("y", "ies"): IES,
    ("f", "ves"): "leaf wolf shelf half calf loaf thief elf self",
    ("fe", "ves"): "knife wife life",
    ("man", "men"): "man woman fireman policeman",
    ("oot", "eet"): "foot",
    ("ooth", "eeth"): "tooth",
    ("oose", "eese"): "goose",
    ("ouse", "ice"): "mouse louse",
    ("", "ren"): "child",
    ("", "en"): "ox",
}


def maximum() -> Iterator[Question]:
    for a, b in permutations(range(1, 100), 2):
        yield f"max({a}, {b}) =", f"{max(a, b)}"


def add() -> Iterator[Question]:
    for a in range(1, 30):
        for b in range(1, 31 - a):
            yield f"{a} + {b} =", f"{a + b}"


def letter() -> Iterator[Question]:
    for alphabet in (string.ascii_lowercase, string.ascii_uppercase):
        for count in (1, 2, 3, 4):
            for start in range(26 - count):
                yield f"{' '.join(alphabet[start : start + count])} ->", alphabet[start + count]


def plural() -> Iterator[Question]:
    for (old, new), nouns in NOUNS.items():
        for noun in nouns.split():
            yield f"{noun} ->", noun.removesuffix(old) + new


def sort() -> Iterator[Question]:
    for digits in permutations("123456789", 3):
        yield f"sort {' '.join(digits)} =", " ".join(sorted(digits))


def digits() -> Iterator[Question]:
    for number in range(20, 1000):
        yield f"{in_words(number)} =", f"{number}"


def in_words(number: int) -> str:
    """306 -> "three hundred and six" """
    if number < 20:
        return TO_NINETEEN.split()[number]
    if number < 100:
        return TENS.split()[number // 10 - 2] + ("-" + TO_NINETEEN.split()[number % 10] if number % 10 else "")
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{TO_NINETEEN.split()[number // 100]} hundred{rest}"


TASKS = {"max": maximum, "add": add, "letter": letter, "plural": plural, "sort": sort, "digits": digits}


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:basics` and `builtin:basics_heldout`."""
    return [row for task in TASKS for row in task_rows(task, held_out=name == "basics_heldout")]


def task_rows(task: str, held_out: bool) -> list[dict[str, Any]]:
    kept, other = split(task)
    chosen = other[:HELD_OUT_ROWS] if held_out else kept[:TRAIN_ROWS]
    return [{"prompt": EXAMPLES[task] + question, "answer": answer, "source": task} for question, answer in chosen]


def split(task: str) -> tuple[list[Question], list[Question]]:
    """Returns the questions to learn from, and those held out, each in an order that is always the same."""
    rng, shown = random.Random(task), {order_free(line) for line in EXAMPLES[task].splitlines()}
    questions = [q for q in TASKS[task]() if order_free(" ".join(q)) not in shown]
    keys = sorted({order_free(question) for question, _ in questions})
    held_out = set(rng.sample(keys, round(HELD_OUT_SHARE * len(keys))))
    rng.shuffle(questions)
    kept = [q for q in questions if order_free(q[0]) not in held_out]
    return kept, [q for q in questions if order_free(q[0]) in held_out]


def order_free(question: str) -> tuple[str, ...]:
    """Returns the words of a question without their order.  "7 + 12 =" -> ("12", "7")"""
    return tuple(sorted(re.findall(r"\w+", question)))
