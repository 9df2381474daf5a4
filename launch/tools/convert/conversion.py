"""A public data set read with the code that reads training data, converted, freed of repetitions, and written."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.tools.convert.converters import Converter, Question
from rlsys.config.schema import ConfigError
from rlsys.data import Origin
from rlsys.data.origin import locate_data
from rlsys.data.readers import BadRow, read_rows


@dataclass(frozen=True)
class ConvertOptions:
    """What the rows are to be. Wishes("Answer in \\boxed{}.", chat=True, name="gsm8k")"""

    instruction: str
    chat: bool
    name: str
    start: int = 0
    count: int | None = None
    levels: tuple[int, ...] = ()


@dataclass
class RowCounts:
    read: int = 0
    repeated: int = 0
    conflicting: int = 0  # repetitions with another answer
    passed_over: int = 0  # before `start`, behind `count`, or of another level
    bad: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)


def write(
    converter: Converter, source: str, out: Path, wishes: ConvertOptions, *, split: str, subset: str, force: bool
) -> str:
    """Converts all of `source` into `out`, and says in words what there was."""
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out} must end in .jsonl or .parquet.")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists. Give --force to replace it, or another name.")
    origin, counts = Origin(source, split, subset), RowCounts()
    rows = [make_row(q, wishes) for q in select_questions(read_questions(converter, origin, counts), wishes, counts)]
    if not rows:
        passed = f"; {counts.passed_over:,} were not asked for (--start, --level)" if counts.passed_over else ""
        raise ConfigError(
            [*counts.first, f"{source}: none of {counts.read:,} rows became a prompt{passed}. Nothing is written."]
        )
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(rows, aside, out.suffix)
        aside.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return describe_counts(source, out, len(rows), counts)


def read_questions(converter: Converter, origin: Origin, counts: RowCounts) -> Iterator[Question]:
    """Each question once, where it stands first."""
    answers: dict[str, tuple[str | None, str]] = {}
    for found in read_rows(origin, locate_data(origin)):
        counts.read += found.rows if isinstance(found, BadRow) else 1
        try:
            if isinstance(found, BadRow):
                raise ValueError(found.detail)
            question = converter.convert(found.fields)
        except ValueError as error:
            counts.bad[found.reason if isinstance(found, BadRow) else "not of this set's form"] += 1
            counts.first += [f"{found.location}: {error}"][: 3 - len(counts.first)]
            continue
        facts = json.dumps(question.facts, sort_keys=True)
        if question.text in answers:
            counts.repeated += 1
            counts.conflicting += answers[question.text] != (question.answer, facts)
            continue
        answers[question.text] = question.answer, facts
        yield question


def select_questions(all_of_them: Iterator[Question], wishes: ConvertOptions, counts: RowCounts) -> Iterator[Question]:
    end = None if wishes.count is None else wishes.start + wishes.count
    number = 0
    for question in all_of_them:
        if wishes.levels and question.facts.get("level") not in wishes.levels:
            counts.passed_over += 1
            continue
        if number >= wishes.start and (end is None or number < end):
            yield question
        else:
            counts.passed_over += 1
        number += 1


def make_row(question: Question, wishes: ConvertOptions) -> dict[str, Any]:
    text = f"{question.text}\n{wishes.instruction}" if wishes.instruction else question.text
    prompt = [{"role": "user", "content": text}] if wishes.chat else f"{text}\n"
    answer = {} if question.answer is None else {"answer": question.answer}
    return {"prompt": prompt, **answer, "source": wishes.name, **question.facts}


def describe_counts(source: str, out: Path, written: int, counts: RowCounts) -> str:
    parts = [f"{out}: {written:,} prompts from {counts.read:,} rows of {source}"]
    if counts.repeated:
        parts.append(f"  {counts.repeated:,} repeated a question and were left out")
    if counts.conflicting:
        parts.append(f"  {counts.conflicting:,} of them with another answer; the first is kept")
    if counts.passed_over:
        parts.append(f"  {counts.passed_over:,} were not asked for (--start, --count, --level)")
    if counts.bad:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts.bad.most_common())
        parts += [f"  left out, as they cannot be used: {reasons}", *(f"    {line}" for line in counts.first)]
    return "\n".join(parts)


def _write(rows: list[dict[str, Any]], file: Path, ending: str) -> None:
    if ending == ".parquet":
        import pyarrow
        import pyarrow.parquet

        names = dict.fromkeys(name for one in rows for name in one)  # some rows may have more than the first
        pyarrow.parquet.write_table(pyarrow.table({name: [one.get(name) for one in rows] for name in names}), file)
        return
    with file.open("w", encoding="utf-8") as lines:
        for one in rows:
            lines.write(json.dumps(one, ensure_ascii=False) + "\n")
