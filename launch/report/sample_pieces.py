"""Saved samples as the page takes them: a few numbers of each, its text, and its tokens, each in a piece of its own per file.

A piece is opened when somebody looks at it, so that a page of many steps opens at once. The numbers of all samples are always
there; of texts and tokens as much as `kept` allows.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlsys.config.secrets import redact
from rlsys.runs.samples import REQUIRED_COLUMNS

Piece = dict[str, Any]
TokenTexts = Callable[[list[int]], list[str]]  # what the tokens are in words
SEPARATOR = "\n\x00\n"  # texts, when all of a file are looked through for secrets at once; no pattern goes over it
MAX_FILE_SHARE = 16  # of all that may be kept, that one file takes at most: 1 / 16
READ_ERRORS = (OSError, ValueError)  # what is raised of a damaged file: by pyarrow, or because a text in it is none
MAX_NAMED = 5  # files that cannot be read, each in a sentence


def sample_files(run: Path) -> list[Path]:
    """Of training steps and evaluations, by step; an evaluation comes after its step."""
    found = [f for kind in ("step", "eval") for f in (run / "samples").glob(f"{kind}-*.parquet") if file_step(f) >= 0]
    return sorted(found, key=lambda f: (file_step(f), file_kind(f) == "eval"))


def file_step(file: Path) -> int:
    digits = file.stem.partition("-")[2]
    return int(digits) if digits.isdigit() else -1


def file_kind(file: Path) -> str:
    return file.stem.partition("-")[0]


def describe_unreadable(why: dict[str, str]) -> list[str]:
    """{"step-000005": "Parquet file size is 0 bytes"} in sentences."""
    said = [
        f"samples/{name}.parquet cannot be read and is left out: {' '.join(reason.split())}"
        for name, reason in why.items()
    ]
    more = len(said) - MAX_NAMED
    return said[:MAX_NAMED] + ([f"{more:,} more of samples/ cannot be read and are left out."] if more > 0 else [])


def sample_numbers(file: Path) -> Piece:
    """What samples are found by: their groups, rewards, advantages, lengths, and how they ended. Columns of one value are that value."""
    import pyarrow.compute

    table = _read(file, ["uid", "source", "reward", "advantage", "failure", "finish", "version", "tokens"])
    count = table.num_rows
    lengths = [0] * count
    if "tokens" in table.column_names:
        lengths = pyarrow.compute.list_value_length(table["tokens"]).to_pylist()
    failure = table["failure"].to_pylist() if "failure" in table.column_names else [None] * count
    groups: list[list[Any]] = []
    for uid, source in zip(table["uid"].to_pylist(), table["source"].to_pylist(), strict=True):
        if not groups or groups[-1][0] != uid:
            groups.append([uid, source, 0])
        groups[-1][2] += 1
    return {
        "name": file.stem,
        "kind": file_kind(file),
        "step": file_step(file),
        "count": count,
        "groups": groups,
        "reward": compact_column(_short(table["reward"])),
        "advantage": compact_column(_short(table["advantage"])),
        "length": compact_column(lengths),
        "finish": compact_column(table["finish"].to_pylist()),
        "failure": compact_column(failure),
        "version": compact_column(table["version"].to_pylist()),
    }


def compact_column(values: list[Any]) -> Any:
    """The values, or the one that all of them are."""
    return values[0] if values and all(v == values[0] for v in values) and not isinstance(values[0], list) else values


def sample_texts(file: Path, groups: int | None = None) -> Piece:
    """Prompts by group, and of each sample what it says and what was said of it; of the first groups, or of all."""
    names = ("uid", "index", "prompt", "completion", "answer", "detail", "components")
    table = _read(file, list(names))
    table = table.slice(0, _rows_of(table, groups))
    count = table.num_rows
    said = {n: table[n].to_pylist() if n in table.column_names else [None] * count for n in names}
    firsts = [i for i, uid in enumerate(said["uid"]) if i == 0 or uid != said["uid"][i - 1]]
    return {
        "prompt": hide_secrets([said["prompt"][i] for i in firsts]),
        "index": said["index"],
        "text": hide_secrets(said["completion"]),
        "answer": compact_column(hide_secrets(said["answer"])),
        "detail": compact_column(hide_secrets(said["detail"])),
        "components": compact_column([json.loads(c) if c and c != "{}" else None for c in said["components"]]),
    }


def sample_tokens(file: Path, groups: int | None, pieces: TokenTexts | None) -> Piece:
    """Of each sample its tokens, and a log-prob, a gap and an advantage for each of them, as far as they were saved."""
    import numpy as np

    table = _read(file, ["uid", "tokens", "rollout_logprobs", "old_logprobs", "token_advantages"])
    table = table.slice(0, _rows_of(table, groups))
    if "tokens" not in table.column_names or not table.num_rows:
        return {"ids": None}
    ids = table["tokens"].to_pylist()
    known = sorted({t for own in ids for t in own})
    rollout = _arrays(table, "rollout_logprobs")
    old, earned = _arrays(table, "old_logprobs"), _arrays(table, "token_advantages")
    gaps = None
    if rollout and old:
        with np.errstate(invalid="ignore"):  # inf - inf
            gaps = [None if o is None or r is None else o - r for o, r in zip(old, rollout, strict=True)]
    words = hide_secrets(list(pieces(known))) if pieces else None
    where = {token: i for i, token in enumerate(known)}
    return {
        "known": known,
        "words": words,
        "ids": [[where[t] for t in own] for own in ids],
        "logprob": rollout and [None if own is None else thousandths(own) for own in rollout],
        "gap": gaps and [None if own is None else [float(f"{x:.2g}") for x in own] for own in gaps],
        "advantage": earned and [None if own is None else [float(f"{x:.3g}") for x in own] for own in earned],
    }


def thousandths(own: Any) -> list[int | float]:
    """[-0.5, nan] -> [-500, nan]"""
    return [round(x) if math.isfinite(x) else x for x in (own * 1000).tolist()]


def _arrays(table: Any, name: str) -> list[Any] | None:
    """[N] of [tokens] or None; None where nothing of it was saved."""
    if name not in table.column_names or table[name].null_count == table.num_rows:
        return None
    return [None if own is None else own.values.to_numpy(zero_copy_only=False) for own in _scalars(table[name])]


def _scalars(chunked: Any) -> Iterator[Any]:
    for value in chunked:
        yield value if value.is_valid else None


def hide_secrets(said: list[Any]) -> list[Any]:
    """With *** for what looks like one."""
    texts = [t for t in said if t]
    clean = iter(redact(SEPARATOR.join(texts)).split(SEPARATOR))
    if SEPARATOR in "".join(texts):  # somebody has written it
        clean = map(redact, texts)
    return [next(clean) if t else t for t in said]


def _read(file: Path, names: list[str]) -> Any:
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file)
    there = parquet.schema_arrow.names
    if missing := [n for n in REQUIRED_COLUMNS if n not in there]:
        raise ValueError(f"it has no column {', '.join(missing)}.")
    return parquet.read([n for n in names if n in there])


def _rows_of(table: Any, groups: int | None) -> int:
    if groups is None:
        return int(table.num_rows)
    seen = 0
    for i, uid in enumerate(before := table["uid"].to_pylist()):
        seen += i == 0 or uid != before[i - 1]
        if seen > groups:
            return i
    return int(table.num_rows)


def _short(values: Any) -> list[float | None]:
    return [None if v is None else float(f"{v:.5g}") for v in values.to_pylist()]


def compress_piece(data: Any) -> bytes:
    """As the page takes it: gzip of JSON, where null stands for nan and infinities."""
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return compress_piece(replace_non_finite(data))
    return gzip.compress(text.encode(errors="replace"), compresslevel=6, mtime=0)


def replace_non_finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: replace_non_finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [replace_non_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@dataclass(frozen=True)
class StoredPieces:
    """Texts and tokens of one file, and of how many of its groups."""

    texts: bytes
    tokens: bytes
    groups: int

    @property
    def size(self) -> int:
        return len(self.texts) + len(self.tokens)


def choose_pieces(
    found: list[Path], most: int, pieces: TokenTexts | None, groups_in: Callable[[Path], int]
) -> tuple[dict[str, StoredPieces], dict[str, str]]:
    """Texts and tokens in at most so many bytes: of training and of evaluations the last file and the first, then the one in
    the middle of what is left, and so on. A file that would take more than a sixteenth of all has the first of its groups only.
    Damage may lie where only texts and tokens are: then also why a file cannot be read.
    """
    chosen: dict[str, StoredPieces] = {}
    why: dict[str, str] = {}
    left, of_group = most, 0.0  # bytes that there are still, and that a group took so far
    kinds = [[f for f in found if file_kind(f) == kind] for kind in ("step", "eval")]
    turns = zip_longest(*([own[i] for i in spread_order(len(own))] for own in kinds))
    for file in (f for turn in turns for f in turn if f):
        share, groups = min(left, most // MAX_FILE_SHARE), groups_in(file)
        if groups * of_group > share:
            groups = max(1, int(share / of_group))
        try:
            one = _pack_within(share, file, groups, pieces)
        except READ_ERRORS as error:
            why[file.stem] = str(error)
            continue
        if one.size > left:
            break
        chosen[file.stem] = one
        left, of_group = left - one.size, max(of_group, one.size / max(1, one.groups))
    return chosen, why


def _pack_within(share: int, file: Path, groups: int, pieces: TokenTexts | None) -> StoredPieces:
    one = _pack(file, groups, pieces)
    while one.size > share and one.groups > 1:
        one = _pack(file, max(1, min(one.groups - 1, int(0.95 * one.groups * share / one.size))), pieces)
    return one


def _pack(file: Path, groups: int, pieces: TokenTexts | None) -> StoredPieces:
    return StoredPieces(
        compress_piece(sample_texts(file, groups)), compress_piece(sample_tokens(file, groups, pieces)), groups
    )


def spread_order(count: int) -> list[int]:
    """0 … count - 1 so that any first few lie evenly apart, the last first.  5 -> 4, 0, 2, 1, 3"""
    order, gaps = [count - 1, 0][:count], [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))
