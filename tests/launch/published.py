"""Public data sets as their authors publish them, a few rows of each."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]
GSM8K = [
    {"question": "How many clips?", "answer": "48/2 = 24\n#### 72"},
    {"question": "How many more?", "answer": "#### 1,072"},
]


def table(file: Path, rows: list[Row]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def array(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1))
    return file


def gsm8k(folder: Path) -> Path:
    for split, own in (("train", GSM8K), ("test", GSM8K[:1])):
        table(folder / "main" / f"{split}-00000-of-00001.parquet", own)
        table(folder / "socratic" / f"{split}-00000-of-00001.parquet", own)
    return folder


def math_row(subject: str, number: int, level: int) -> Row:
    solution = f"So $\\boxed{{{number}}}$."
    return {"problem": f"Problem {number}", "level": f"Level {level}", "type": subject, "solution": solution}


def math_tree(folder: Path) -> Path:
    """A file for each problem."""
    for split, subject, number, level in (
        ("train", "algebra", 1, 1),
        ("train", "geometry", 2, 5),
        ("test", "algebra", 3, 3),
    ):
        file = folder / split / subject / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(math_row(subject, number, level)))
    return folder


def dapo_row(question: str, answer: int, index: int) -> Row:
    text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        f"(without quotes) where $Answer is the answer to the problem.\n\n{question}\n\nRemember to put your answer on its own "
        'line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{index}"},
    }


def countdown_rows(first: int, last: int) -> list[Row]:
    return [{"target": n, "nums": [n, 1, 1]} for n in range(first, last)]


def all_of_them(folder: Path, home: Path) -> None:
    """Each under its hub name in `folder`; what is downloaded by hand, in `home`."""
    gsm8k(folder / "openai" / "gsm8k")
    table(
        folder / "DigitalLearningGmbH/MATH-lighteval/data/train.parquet",
        [math_row("algebra", n, n) for n in range(1, 6)],
    )
    table(folder / "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet", [dapo_row("Question", 7, 0)])
    table(folder / "Jiayi-Pan/Countdown-Tasks-3to4/data/train.parquet", countdown_rows(10, 30))
    array(
        folder / "agentica-org/DeepScaleR-Preview-Dataset/deepscaler.json",
        [{"problem": "p", "answer": "\\frac{1}{2}", "solution": "s"}],
    )
    math_tree(home / "MATH")
