"""Saved samples as the page reads them: for each file a piece with numbers, one with texts, and one with tokens.

The page opens a piece when somebody looks at it, so a page of many steps opens at once. It always has the numbers of
all samples; texts and tokens it has as far as `choose_pieces` finds room.
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

Piece = dict[str, Any]
TokenTexts = Callable[[list[int]], list[str]]  # from token ids to their texts
SEPARATOR = "\n\x00\n"  # between texts that are searched for secrets together; no pattern matches across it
MAX_FILE_SHARE = 16  # one file may take 1 / 16 of the room
READ_ERRORS = (OSError, ValueError)  # that pyarrow raises for a damaged file, or a text in it that is not valid
MAX_NAMED = 5  # unreadable files that get a sentence each


def sample_files(run: Path) -> list[Path]:
    """Returns the files of training steps and evaluations by step; an evaluation comes after its step."""
    files = [f for kind in ("step", "eval") for f in (run / "samples").glob(f"{kind}-*.parquet") if file_step(f) >= 0]
    return sorted(files, key=lambda f: (file_step(f), file_kind(f) == "eval"))


def file_step(file: Path) -> int:
    digits = file.stem.partition("-")[2]
    return int(digits) if digits.isdigit() else -1


def file_kind(file: Path) -> str:
    return file.stem.partition("-")[0]


def describe_unreadable(errors: dict[str, str]) -> list[str]:
    """Turns {"step-000005": "Parquet file size is 0 bytes"} into sentences."""
    sentences = [
        f"samples/{name}.parquet cannot be read and is left out: {' '.join(error.split())}"
        for name, error in errors.items()
    ]
    others = len(sentences) - MAX_NAMED
    summary = [f"{others:,} more of samples/ cannot be read and are left out."] if others > 0 else []
    return sentences[:MAX_NAMED] + summary


# --- the pieces of one file -------------------------------------------------------------------------------------------


def sample_numbers(file: Path) -> Piece:
    """Returns what samples are searched by: groups, rewards, advantages, lengths, and how they ended.

    A column whose values are all equal is that value.
    """
    import pyarrow.compute

    table = _read(file, ["uid", "source", "reward", "advantage", "failure", "finish", "version", "tokens"])
    groups: list[list[Any]] = []  # [uid, source, size]
    for uid, source in zip(table["uid"].to_pylist(), table["source"].to_pylist(), strict=True):
        if not groups or groups[-1][0] != uid:
            groups.append([uid, source, 0])
        groups[-1][2] += 1
    return {
        "name": file.stem,
        "kind": file_kind(file),
        "step": file_step(file),
        "count": table.num_rows,
        "groups": groups,
        "reward": compact_column(_round(table["reward"])),
        "advantage": compact_column(_round(table["advantage"])),
        "length": compact_column(pyarrow.compute.list_value_length(table["tokens"]).to_pylist()),
        "finish": compact_column(table["finish"].to_pylist()),
        "failure": compact_column(table["failure"].to_pylist()),
        "version": compact_column(table["version"].to_pylist()),
    }


def compact_column(values: list[Any]) -> Any:
    """Returns the values, or the one value that all of them have."""
    all_equal = bool(values) and all(v == values[0] for v in values) and not isinstance(values[0], list)
    return values[0] if all_equal else values


def sample_texts(file: Path, groups: int | None = None) -> Piece:
    """Returns the prompts, and each sample's text, answer, detail, components and episode; of the first groups, or of
    all.
    """
    names = ["uid", "index", "prompt", "completion", "answer", "detail", "components", "transcript", "turn_scores"]
    table = _read(file, names)
    table = table.slice(0, _row_count(table, groups))
    columns = {n: table[n].to_pylist() for n in names}
    first_rows = [i for i, uid in enumerate(columns["uid"]) if i == 0 or uid != columns["uid"][i - 1]]
    return {
        "prompt": hide_secrets([columns["prompt"][i] for i in first_rows]),
        "index": columns["index"],
        "text": hide_secrets(columns["completion"]),
        "answer": compact_column(hide_secrets(columns["answer"])),
        "detail": compact_column(hide_secrets(columns["detail"])),
        "components": compact_column([json.loads(c) if c and c != "{}" else None for c in columns["components"]]),
        "transcript": compact_column(
            hide_nested_secrets([json.loads(t) if t else None for t in columns["transcript"]])
        ),
        "turn_scores": compact_column(columns["turn_scores"]),
    }


def sample_tokens(file: Path, groups: int | None, token_texts: TokenTexts | None) -> Piece:
    """Returns each sample's tokens, with a log-prob, a gap and an advantage per token, as far as they were saved; and
    the tokens of its environment, behind the place of each observation.
    """
    import numpy as np

    table = _read(file, ["uid", "tokens", "rollout_logprobs", "old_logprobs", "token_advantages", "observations"])
    table = table.slice(0, _row_count(table, groups))
    ids, observed = table["tokens"].to_pylist(), table["observations"].to_pylist()
    own = {token for tokens in ids for token in tokens}
    known = sorted(own.union(token for entries in observed for _, *tokens in entries for token in tokens))
    position = {token: i for i, token in enumerate(known)}
    rollout, old = _arrays(table, "rollout_logprobs"), _arrays(table, "old_logprobs")
    advantages = _arrays(table, "token_advantages")
    gaps = None
    if rollout and old:
        with np.errstate(invalid="ignore"):  # inf - inf
            gaps = [None if o is None or r is None else o - r for o, r in zip(old, rollout, strict=True)]
    return {
        "known": known,
        "words": hide_secrets(list(token_texts(known))) if token_texts else None,
        "ids": [[position[t] for t in tokens] for tokens in ids],
        "observed": [[[at, *(position[t] for t in tokens)] for at, *tokens in entries] for entries in observed]
        if any(observed)
        else None,
        "logprob": rollout and [None if numbers is None else thousandths(numbers) for numbers in rollout],
        "gap": gaps and [None if numbers is None else [float(f"{x:.2g}") for x in numbers] for numbers in gaps],
        "advantage": advantages
        and [None if numbers is None else [float(f"{x:.3g}") for x in numbers] for numbers in advantages],
    }


def thousandths(numbers: Any) -> list[int | float]:
    """[-0.5, nan] -> [-500, nan]"""
    return [round(x) if math.isfinite(x) else x for x in (numbers * 1000).tolist()]


def _arrays(table: Any, name: str) -> list[Any] | None:
    """Returns an array or None per sample; None if the column is empty."""
    column = table[name]
    if column.null_count == table.num_rows:
        return None
    return [value.values.to_numpy(zero_copy_only=False) if value.is_valid else None for value in column]


def hide_secrets(texts: list[Any]) -> list[Any]:
    """Replaces what looks like a secret with ***. Searches all texts at once, which is faster."""
    present = [t for t in texts if t]
    redacted = iter(redact(SEPARATOR.join(present)).split(SEPARATOR))
    if SEPARATOR in "".join(present):
        redacted = map(redact, present)
    return [next(redacted) if t else t for t in texts]


def hide_nested_secrets(value: Any) -> Any:
    """The same for all texts in nested lists and objects."""
    hidden = iter(hide_secrets(list(_texts_in(value))))

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replace(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [replace(entry) for entry in value]
        return next(hidden) if isinstance(value, str) else value

    return replace(value)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(entry)


def _read(file: Path, names: list[str]) -> Any:
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file)
    available = parquet.schema_arrow.names
    if missing := [n for n in names if n not in available]:
        raise ValueError(f"it has no column {', '.join(missing)}.")
    return parquet.read(names)


def _row_count(table: Any, groups: int | None) -> int:
    """The number of rows of the first groups."""
    if groups is None:
        return int(table.num_rows)
    uids = table["uid"].to_pylist()
    starts = [i for i, uid in enumerate(uids) if i == 0 or uid != uids[i - 1]]
    return starts[groups] if groups < len(starts) else len(uids)


def _round(values: Any) -> list[float | None]:
    return [None if v is None else float(f"{v:.5g}") for v in values.to_pylist()]


def compress_piece(data: Any) -> bytes:
    """Returns gzip of JSON, with null for nan and infinities."""
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


# --- which pieces a report stores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPieces:
    """Texts and tokens of one file, and the number of its groups that they cover."""

    texts: bytes
    tokens: bytes
    groups: int

    @property
    def size(self) -> int:
        return len(self.texts) + len(self.tokens)


def choose_pieces(
    files: list[Path], max_bytes: int, token_texts: TokenTexts | None, group_count: Callable[[Path], int]
) -> tuple[dict[str, StoredPieces], dict[str, str]]:
    """Chooses files whose texts and tokens fit in `max_bytes`. Returns their pieces, and errors of unreadable files.

    Of training steps and of evaluations it takes the last file and the first, then the middle of each gap. A file that
    would take more than its share of the room has only its first groups.
    """
    chosen: dict[str, StoredPieces] = {}
    errors: dict[str, str] = {}
    left, bytes_per_group = max_bytes, 0.0
    by_kind = [[f for f in files if file_kind(f) == kind] for kind in ("step", "eval")]
    turns = zip_longest(*([of_kind[i] for i in spread_order(len(of_kind))] for of_kind in by_kind))
    for file in (f for turn in turns for f in turn if f):
        share, groups = min(left, max_bytes // MAX_FILE_SHARE), group_count(file)
        if groups * bytes_per_group > share:
            groups = max(1, int(share / bytes_per_group))
        try:
            pieces = _make_pieces_within(share, file, groups, token_texts)
        except READ_ERRORS as error:
            errors[file.stem] = str(error)
            continue
        if pieces.size > left:
            break
        chosen[file.stem] = pieces
        left, bytes_per_group = left - pieces.size, max(bytes_per_group, pieces.size / max(1, pieces.groups))
    return chosen, errors


def _make_pieces_within(share: int, file: Path, groups: int, token_texts: TokenTexts | None) -> StoredPieces:
    pieces = _make_pieces(file, groups, token_texts)
    while pieces.size > share and pieces.groups > 1:
        fewer = int(0.95 * pieces.groups * share / pieces.size)
        pieces = _make_pieces(file, max(1, min(pieces.groups - 1, fewer)), token_texts)
    return pieces


def _make_pieces(file: Path, groups: int, token_texts: TokenTexts | None) -> StoredPieces:
    texts, tokens = sample_texts(file, groups), sample_tokens(file, groups, token_texts)
    return StoredPieces(compress_piece(texts), compress_piece(tokens), groups)


def spread_order(count: int) -> list[int]:
    """Orders 0 … count - 1 so that any first few are evenly spread, beginning with the last.  5 -> 4, 0, 2, 1, 3"""
    order, gaps = [count - 1, 0][:count], [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))
