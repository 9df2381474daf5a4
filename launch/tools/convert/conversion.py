"""Reads a public data set with the code for training data, converts it, drops repetitions, and writes it."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.tools.convert.converters import Converter, Question
from rlsys.data import Origin
from rlsys.data.origin import locate_data
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import BadRow
from rlsys.errors import ConfigError


@dataclass(frozen=True)
class ConvertOptions:
    """How rows are written, and which. `ConvertOptions("Answer in \\boxed{}.", chat=True, name="gsm8k")`"""

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
    not_selected: int = 0  # before `start`, after `count`, or of another level
    bad: Counter[str] = field(default_factory=Counter)  # by reason
    first_bad: list[str] = field(default_factory=list)


def convert_to_file(
    converter: Converter, source: str, out: Path, options: ConvertOptions, *, split: str, subset: str, force: bool
) -> str:
    """Converts `source` into `out`. Returns a description of what was read and written."""
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out} must end in .jsonl or .parquet.")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists. Give --force to replace it, or another name.")
    origin, counts = Origin(source, split, subset), RowCounts()
    rows = [make_row(q, options) for q in select_questions(read_questions(converter, origin, counts), options, counts)]
    if not rows:
        passed = f"; {counts.not_selected:,} were not asked for (--start, --level)" if counts.not_selected else ""
        raise ConfigError(
            [*counts.first_bad, f"{source}: none of {counts.read:,} rows became a prompt{passed}. Nothing is written."]
        )
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows, unfinished, out.suffix)
        unfinished.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return describe_counts(source, out, len(rows), counts)


def read_questions(converter: Converter, origin: Origin, counts: RowCounts) -> Iterator[Question]:
    """Yields each question once, at its first occurrence."""
    answers: dict[str, tuple[str | None, str]] = {}
    for row in read_rows(origin, locate_data(origin)):
        counts.read += row.rows if isinstance(row, BadRow) else 1
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.detail)
            question = converter.convert(row.fields)
        except ValueError as error:
            counts.bad[row.reason if isinstance(row, BadRow) else "not of this set's form"] += 1
            counts.first_bad += [f"{row.location}: {error}"][: 3 - len(counts.first_bad)]
            continue
        answer = question.answer, json.dumps(question.facts, sort_keys=True)
        if question.text in answers:
            counts.repeated += 1
            counts.conflicting += answers[question.text] != answer
            continue
        answers[question.text] = answer
        yield question


def select_questions(questions: Iterator[Question], options: ConvertOptions, counts: RowCounts) -> Iterator[Question]:
    """Applies --level, and then --start and --count."""
    end = None if options.count is None else options.start + options.count
    number = 0
    for question in questions:
        if options.levels and question.facts.get("level") not in options.levels:
            counts.not_selected += 1
            continue
        if number >= options.start and (end is None or number < end):
            yield question
        else:
            counts.not_selected += 1
        number += 1


def make_row(question: Question, options: ConvertOptions) -> dict[str, Any]:
    text = f"{question.text}\n{options.instruction}" if options.instruction else question.text
    prompt = [{"role": "user", "content": text}] if options.chat else f"{text}\n"
    answer = {} if question.answer is None else {"answer": question.answer}
    return {"prompt": prompt, **answer, "source": options.name, **question.facts}


def describe_counts(source: str, out: Path, written: int, counts: RowCounts) -> str:
    parts = [f"{out}: {written:,} prompts from {counts.read:,} rows of {source}"]
    if counts.repeated:
        parts.append(f"  {counts.repeated:,} repeated a question and were left out")
    if counts.conflicting:
        parts.append(f"  {counts.conflicting:,} of them with another answer; the first is kept")
    if counts.not_selected:
        parts.append(f"  {counts.not_selected:,} were not asked for (--start, --count, --level)")
    if counts.bad:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts.bad.most_common())
        parts += [f"  left out, as they cannot be used: {reasons}", *(f"    {line}" for line in counts.first_bad)]
    return "\n".join(parts)


def write_rows(rows: list[dict[str, Any]], file: Path, ending: str) -> None:
    if ending == ".parquet":
        import pyarrow
        import pyarrow.parquet

        names = dict.fromkeys(name for row in rows for name in row)  # later rows may have more fields than the first
        pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), file)
        return
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
