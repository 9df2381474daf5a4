"""Samples on disk: a parquet file per step and per evaluation, one row per sample, judged or not.

uid index source prompt completion      what was asked, which sample of its group, what came
reward advantage answer components      what the reward functions said; reward is null where they failed
failure detail                          why, and its first line
finish version tokens rollout_logprobs  how the engine made it
old_logprobs token_advantages           what the policy said of the tokens before the step, and what each of them earned; null where
                                        the step asked for no old log-probs, and where all tokens earned the sample's advantage
changes                                 [[token, version], …]: from that token on it is of newer weights
rewards row messages                    what a reward function asks for, so that another one can judge it later
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.config.schema import ConfigError
from rlsys.runs.timeline import recorded
from rlsys.text import replace_surrogates
from rlsys.types import Batch, Columns, Floats, Prompt, Sample, Verdict

# What every version has written.
REQUIRED_COLUMNS = ("uid", "index", "source", "prompt", "completion", "reward", "advantage", "finish", "version")
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "token_advantages")  # a number for each token


@dataclass(frozen=True)
class SavedSample:
    """A sample read back. Of its tokens there are as many as there were, all 0: which they were, and log-probs, stays on disk."""

    prompt: Prompt
    sample: Sample
    verdict: Verdict
    advantage: float | None


def warm_up_pyarrow() -> None:
    """What is slow about the first of them, and not to be waited for in a step: with its first list pyarrow imports pandas."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.array([0])


@recorded()
def write_samples(
    target: Path, batch: Batch, advantages: Floats | None = None, per_token: Columns | None = None
) -> None:
    """Every sample of a batch, groups standing together; written aside and renamed. `advantages` are [N], `per_token` [T]."""
    import pyarrow as pa
    import pyarrow.parquet

    group = {p.uid: g for g, p in enumerate(batch.prompts)}
    failed = {(s.uid, s.index): (s, verdict) for s, verdict in batch.failed if s.uid in group}
    judged, known = [], per_token or Columns()
    old, earned = (split_column(batch, c) for c in (known.old, drop_uniform(batch, known.advantages)))
    answers = batch.answers or [None] * len(batch.samples)
    for s, reward, components, answer in zip(batch.samples, batch.rewards, batch.components, answers, strict=True):
        _, why = failed.pop((s.uid, s.index), (s, Verdict(None)))  # it may have failed and have a score all the same
        judged.append(Verdict(float(reward), components, why.failure, why.detail, answer))
    rows = list(
        zip(
            batch.groups.tolist(),
            batch.samples,
            judged,
            floats_or_none(advantages, len(judged)),
            old,
            earned,
            strict=True,
        )
    )
    rows += [(group[s.uid], s, verdict, None, None, None) for s, verdict in failed.values()]
    rows.sort(key=lambda row: row[0])
    prompts = [batch.prompts[g] for g, *_ in rows]
    facts = {p.uid: (to_json(p.row), to_json(p.messages) if p.messages else None) for p in batch.prompts}
    samples, verdicts = [s for _, s, *_ in rows], [v for _, _, v, *_ in rows]
    columns = {
        "uid": pa.array([s.uid for s in samples], pa.string()),
        "index": pa.array([s.index for s in samples], pa.int64()),
        "source": pa.array([p.source for p in prompts], pa.string()),
        "prompt": pa.array([p.text for p in prompts], pa.string()),
        "completion": pa.array([s.text for s in samples], pa.string()),
        "reward": pa.array([v.score for v in verdicts], pa.float32()),
        "advantage": pa.array([advantage for _, _, _, advantage, *_ in rows], pa.float32()),
        "answer": pa.array([None if v.answer is None else replace_surrogates(v.answer) for v in verdicts], pa.string()),
        "components": pa.array([to_json(v.components) for v in verdicts], pa.string()),
        "failure": pa.array([v.failure or None for v in verdicts], pa.string()),
        "detail": pa.array([first_line(v.detail) or None for v in verdicts], pa.string()),
        "finish": pa.array([s.finish for s in samples], pa.string()),
        "version": pa.array([s.version for s in samples], pa.int64()),
        "changes": pa.array([s.changes for s in samples], pa.list_(pa.list_(pa.int64()))),
        "tokens": pa.array([s.tokens for s in samples], pa.list_(pa.int32())),
        "rollout_logprobs": pa.array([s.logprobs for s in samples], pa.list_(pa.float32())),
        "old_logprobs": pa.array([numbers for *_, numbers, _ in rows], pa.list_(pa.float32())),
        "token_advantages": pa.array([numbers for *_, numbers in rows], pa.list_(pa.float32())),
        "rewards": pa.array([p.rewards for p in prompts], pa.string()),
        "row": pa.array([facts[p.uid][0] for p in prompts], pa.string()),
        "messages": pa.array([facts[p.uid][1] for p in prompts], pa.string()),
    }
    aside = target.with_name(f".{target.name}.tmp")
    numbers = ("tokens", *PER_TOKEN)  # in a dictionary they would take twice the time, and more room
    pyarrow.parquet.write_table(
        pa.table(columns),
        aside,
        compression="zstd",  # a group's texts repeat
        use_dictionary=[name for name in columns if name not in numbers],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in numbers},
    )
    aside.rename(target)


def read_saved_samples(file: Path) -> Iterator[SavedSample]:
    """The samples of a file, in its order. A file of an older version lacks columns; what was in them is empty."""
    prompts: dict[str, Prompt] = {}
    for row in read_rows(file):
        uid = row["uid"]
        if uid not in prompts:
            prompts[uid] = Prompt(
                uid,
                row["source"],
                row["prompt"],
                [],
                json.loads(row.get("row") or "{}"),
                messages=json.loads(row.get("messages") or "null"),
                rewards=row.get("rewards") or "",
            )
        yield SavedSample(
            prompts[uid],
            Sample(
                uid,
                row["index"],
                row["completion"],
                np.zeros(row["count"], dtype=np.int32),
                np.zeros(0, dtype=np.float32),
                row["finish"],
                row["version"],
                tuple((at, to) for at, to in row.get("changes") or ()),
            ),
            Verdict(
                row["reward"],
                json.loads(row.get("components") or "{}"),
                row.get("failure") or "",
                row.get("detail") or "",
                row.get("answer"),
            ),
            row["advantage"],
        )


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The columns of each sample, and instead of its tokens their `count`."""
    import pyarrow.compute

    table = open_parquet(file)
    names = table.schema_arrow.names
    if missing := [n for n in REQUIRED_COLUMNS if n not in names]:
        raise ConfigError(f"{file} holds no samples: it has no column {', '.join(missing)}, only {', '.join(names)}.")
    for part in table.iter_batches(1024, columns=[name for name in names if name not in PER_TOKEN]):
        counts = [0] * len(part)
        if "tokens" in names:
            counts = pyarrow.compute.list_value_length(part.column("tokens")).to_pylist()
            part = part.drop_columns(["tokens"])
        for row, count in zip(part.to_pylist(), counts, strict=True):
            yield row | {"count": count}


def open_parquet(file: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile`."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except Exception as error:
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from None


def split_column(batch: Batch, column: Floats | None) -> Iterator[Floats | None]:
    """A per-token column, one array per sample, or as many None.  [T] -> [N]"""
    return iter([None] * len(batch.samples) if column is None else batch.split(column))


def drop_uniform(batch: Batch, column: Floats | None) -> Floats | None:
    """The column, unless it says the same of all tokens of each sample.  [T]"""
    if column is None:
        return None
    lengths = batch.lengths[batch.lengths > 0]
    firsts = column[lengths.cumsum() - lengths]
    return None if (np.repeat(firsts, lengths) == column).all() else column


def floats_or_none(numbers: Floats | None, count: int) -> list[float | None]:
    return [None] * count if numbers is None else [float(n) for n in numbers]


def to_json(value: Any) -> str:
    """What JSON cannot say, such as a date, becomes its text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text == replace_surrogates(text) else json.dumps(value, default=str)


def first_line(text: str) -> str:
    return replace_surrogates(text.strip().partition("\n")[0][:500])
