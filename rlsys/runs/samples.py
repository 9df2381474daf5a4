"""Samples on disk: a parquet file per step and per evaluation, one row per sample, judged or not.

uid index source prompt completion      the prompt, the sample's index in its group, and the completion
reward advantage answer components      what the reward functions returned; reward is null where they failed, or had nothing to judge
failure detail                          why they failed, and the first line of the error
finish version tokens rollout_logprobs  how the engine sampled it; log-probs are null in supervised training
old_logprobs token_advantages           per token: the policy's log-probs before the step, and advantages. Null where
                                        none were computed, and where all tokens have the sample's advantage
changes                                 [[token, version], …]: from that token on, it was sampled from newer weights
rewards row messages                    what reward functions ask for, so that other ones can judge the sample later
observations                            [[place, token, …], …]: what an environment said before the token at that place
after                                   the turn that each of these continues, -1: none; null: the one before it
transcript turn_scores                  of an episode: its messages, and the score of each turn; null for single answers
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlsys.errors import ConfigError
from rlsys.runs.timeline import recorded
from rlsys.text import replace_surrogates
from rlsys.types import Batch, Columns, Episode, Floats, Observation, Prompt, Sample, Verdict

COLUMNS = (
    *("uid", "index", "source", "prompt", "completion", "reward", "advantage", "answer", "components", "failure"),
    *("detail", "finish", "version", "changes", "tokens", "rollout_logprobs", "old_logprobs", "token_advantages"),
    *("rewards", "row", "messages", "observations", "transcript", "turn_scores"),
)
NUMBER_LISTS = ("tokens", "rollout_logprobs", "old_logprobs", "token_advantages")  # a number for each token


@dataclass(frozen=True)
class SavedSample:
    """A sample read back. Its tokens are all 0, as many as there were: the ids and the log-probs stay on disk."""

    prompt: Prompt
    sample: Sample
    verdict: Verdict
    advantage: float | None


class SampleRow(NamedTuple):
    """A sample with everything that its row is made of."""

    group: int
    sample: Sample
    verdict: Verdict
    advantage: float | None = None
    old: Floats | None = None
    token_advantages: Floats | None = None


# --- writing ---------------------------------------------------------------------------------------------------------


def warm_up_pyarrow() -> None:
    """Does the slow part of the first file before a step waits for it: with its first list, pyarrow imports pandas."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.array([0])


@recorded()
def write_samples(
    target: Path, batch: Batch, advantages: Floats | None = None, per_token: Columns | None = None
) -> None:
    """Writes every sample of a batch, group by group. A file gets its name when it is complete.

    `advantages` are [N], `per_token` [T].
    """
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table(make_columns(batch, make_rows(batch, advantages, per_token or Columns())))
    unfinished = target.with_name(f".{target.name}.tmp")
    pyarrow.parquet.write_table(
        table,
        unfinished,
        compression="zstd",  # a group's texts repeat
        # In a dictionary, lists of numbers would take twice the time, and more room.
        use_dictionary=[name for name in COLUMNS if name not in NUMBER_LISTS],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in NUMBER_LISTS},
    )
    unfinished.rename(target)


def make_rows(batch: Batch, advantages: Floats | None, per_token: Columns) -> list[SampleRow]:
    """Returns the rows of all samples, groups in order, those with a reward first in each."""
    group = {p.uid: g for g, p in enumerate(batch.prompts)}
    failed = {(s.uid, s.index): (s, verdict) for s, verdict in batch.failed if s.uid in group}
    old = split_column(batch, per_token.old)
    token_advantages = split_column(batch, drop_uniform(batch, per_token.advantages))
    rows = []
    for i, (g, sample) in enumerate(zip(batch.groups.tolist(), batch.samples, strict=True)):
        # With `reward.on_failure: score: x`, a sample has failed and has a score all the same.
        _, failure = failed.pop((sample.uid, sample.index), (sample, Verdict(None)))
        answer = batch.answers[i] if batch.answers else None
        score, components = None if batch.is_shown else float(batch.rewards[i]), batch.components[i]
        verdict = Verdict(score, components, failure.failure, failure.detail, answer)
        advantage = None if advantages is None else float(advantages[i])
        rows.append(SampleRow(g, sample, verdict, advantage, old[i], token_advantages[i]))
    rows += [SampleRow(group[sample.uid], sample, verdict) for sample, verdict in failed.values()]
    return sorted(rows, key=lambda row: row.group)


def make_columns(batch: Batch, rows: list[SampleRow]) -> dict[str, Any]:
    """Returns the columns of a file as pyarrow arrays, in the order of `COLUMNS`."""
    import pyarrow as pa

    samples, verdicts = [row.sample for row in rows], [row.verdict for row in rows]
    prompts = [batch.prompts[row.group] for row in rows]
    json_of = {p.uid: (to_json(p.row), to_json(p.messages) if p.messages else None) for p in batch.prompts}
    text, integer, real = pa.string(), pa.int64(), pa.float32()
    integer_lists = pa.list_(pa.list_(integer))
    columns: dict[str, tuple[list[Any], Any]] = {
        "uid": ([s.uid for s in samples], text),
        "index": ([s.index for s in samples], integer),
        "source": ([p.source for p in prompts], text),
        "prompt": ([p.text for p in prompts], text),
        "completion": ([s.text for s in samples], text),
        "reward": ([v.score for v in verdicts], real),
        "advantage": ([row.advantage for row in rows], real),
        "answer": ([None if v.answer is None else replace_surrogates(v.answer) for v in verdicts], text),
        "components": ([to_json(v.components) for v in verdicts], text),
        "failure": ([v.failure or None for v in verdicts], text),
        "detail": ([first_line(v.detail) or None for v in verdicts], text),
        "finish": ([s.finish for s in samples], text),
        "version": ([s.version for s in samples], integer),
        "changes": ([s.changes for s in samples], integer_lists),
        "tokens": ([s.tokens for s in samples], pa.list_(pa.int32())),
        "rollout_logprobs": ([None if batch.is_shown else s.logprobs for s in samples], pa.list_(real)),
        "old_logprobs": ([row.old for row in rows], pa.list_(real)),
        "token_advantages": ([row.token_advantages for row in rows], pa.list_(real)),
        "rewards": ([p.rewards for p in prompts], text),
        "row": ([json_of[p.uid][0] for p in prompts], text),
        "messages": ([json_of[p.uid][1] for p in prompts], text),
        "observations": ([[[o.at, *o.tokens.tolist()] for o in s.observations] for s in samples], integer_lists),
        "after": ([[o.after for o in s.observations] for s in samples], pa.list_(integer)),
        "transcript": ([s.episode and to_json(s.episode.messages) for s in samples], text),
        "turn_scores": ([s.episode and s.episode.turn_scores for s in samples], pa.list_(real)),
    }
    return {name: pa.array(values, kind) for name, (values, kind) in columns.items()}


def split_column(batch: Batch, column: Floats | None) -> list[Floats] | list[None]:
    """Splits a per-token column into one array per sample; no column gives as many None.  [T] -> [N]"""
    return [None] * len(batch.samples) if column is None else batch.split(column)


def drop_uniform(batch: Batch, column: Floats | None) -> Floats | None:
    """Returns a per-token column, or None if it has one and the same number for all tokens of each sample.  [T]"""
    if column is None:
        return None
    lengths = batch.lengths[batch.lengths > 0]
    firsts = column[lengths.cumsum() - lengths]
    return None if (np.repeat(firsts, lengths) == column).all() else column


def to_json(value: Any) -> str:
    """Returns a value as JSON. What JSON does not know, such as a date, becomes a text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text == replace_surrogates(text) else json.dumps(value, default=str)


def first_line(text: str) -> str:
    return replace_surrogates(text.strip().partition("\n")[0][:500])


# --- reading ---------------------------------------------------------------------------------------------------------


def read_saved_samples(file: Path) -> Iterator[SavedSample]:
    """Yields the samples of a file, in its order."""
    prompts: dict[str, Prompt] = {}
    for row in read_rows(file):
        uid = row["uid"]
        if uid not in prompts:
            facts, messages = json.loads(row["row"]), json.loads(row["messages"] or "null")
            prompts[uid] = Prompt(
                uid, row["source"], row["prompt"], [], facts, messages=messages, rewards=row["rewards"]
            )
        sample = Sample(
            uid,
            row["index"],
            row["completion"],
            np.zeros(row["count"], dtype=np.int32),
            np.zeros(0, dtype=np.float32),
            row["finish"],
            row["version"],
            tuple((token, version) for token, version in row["changes"]),
            tuple(
                Observation(at, np.array(tokens, dtype=np.int32), after)
                for (at, *tokens), after in zip_longest(row["observations"], row.get("after") or ())
            ),
            row["transcript"] and Episode(None, json.loads(row["transcript"]), row["turn_scores"]),
        )
        components, failure, detail = json.loads(row["components"]), row["failure"] or "", row["detail"] or ""
        verdict = Verdict(row["reward"], components, failure, detail, row["answer"])
        yield SavedSample(prompts[uid], sample, verdict, row["advantage"])


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the columns of each sample, with the `count` of its tokens in place of the lists of numbers."""
    import pyarrow.compute

    table = open_parquet(file)
    names = table.schema_arrow.names
    if missing := [name for name in COLUMNS if name not in names]:
        problem = f"it has no column {', '.join(missing)}, only {', '.join(names)}"
        raise ConfigError(f"{file} holds no samples: {problem}.")
    wanted = [name for name in names if name == "tokens" or name not in NUMBER_LISTS]
    for part in table.iter_batches(1024, columns=wanted):
        counts = pyarrow.compute.list_value_length(part.column("tokens")).to_pylist()
        for row, count in zip(part.drop_columns(["tokens"]).to_pylist(), counts, strict=True):
            yield row | {"count": count}


def open_parquet(file: Path) -> Any:
    """Opens a `pyarrow.parquet.ParquetFile`."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except Exception as error:  # the library raises errors of many kinds
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from None
