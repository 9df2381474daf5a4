"""Prepares a data set in one pass: read ─▶ render ─▶ tokenize ─▶ store. Memory does not grow with the data."""

import base64
import datetime
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from rlsys.data import cache
from rlsys.data.cache import Note
from rlsys.data.demonstrations import TurnText, sequence_of, to_stored, tokenize_turns, turn_texts
from rlsys.data.origin import DataLocation, Origin, locate_data
from rlsys.data.prompt_end import describe_end
from rlsys.data.readers import read_rows
from rlsys.data.readers.rows import BadRow, DataRow
from rlsys.data.readers.tables import load_hugging_face
from rlsys.data.render import (
    PromptFormat,
    PromptRenderer,
    RenderedPrompt,
    UnusableRow,
    drop_nulls,
    read_template,
    reward_fields,
)
from rlsys.data.store import RowWriter, StoredDataset
from rlsys.data.tokens import tokenize_prompts
from rlsys.errors import ConfigError
from rlsys.text import replace_surrogates
from rlsys.types import Demonstration

VERSION = 6  # of the stored form; data stored in another version is prepared again
MAX_ROWS, MAX_CHARACTERS = 1000, 4_000_000  # that are tokenized together
NOTE_INTERVAL_S = 10.0


class DatasetPreparer:
    """Prepares data sets, or finds them in the cache. `DatasetPreparer(tokenizer, note)(origin, form)`

    `vocabulary`: tokens of the model; 0: not known.
    """

    def __init__(self, tokenizer: Any, note: Note, vocabulary: int = 0):
        self.tokenizer, self.note, self.vocabulary = tokenizer, note, vocabulary

    def __call__(self, origin: Origin, form: PromptFormat) -> StoredDataset:
        location = locate_data(origin)
        is_small = location.kind == "files" and sum(f.stat().st_size for f in location.files) < cache.SMALL_BYTES
        if location.kind in ("builtin", "gym", "verifiers") or is_small:
            return self.prepare_rows(origin, location, form, None)
        template = form.template and read_template(form.template)
        key = [VERSION, asdict(origin), asdict(form), template, self.fingerprint]
        key += self.content_fingerprints(origin, location)
        key += [self.vocabulary] if self.model_lacks_tokens else []
        return cache.get_or_build(
            location.name, key, lambda folder: self.prepare_rows(origin, location, form, folder), note=self.note
        )

    def prepare_first(self, origin: Origin, form: PromptFormat, count: int) -> StoredDataset:
        """Prepares the first rows of a data set alone, in memory."""
        location = locate_data(origin)
        return self.prepare_rows(origin, location, form, None, islice(read_rows(origin, location), count))

    @cached_property
    def fingerprint(self) -> str:
        return cache.tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def model_lacks_tokens(self) -> bool:
        """True if the tokenizer has tokens that the model does not have."""
        return 0 < self.vocabulary <= max(self.tokenizer.get_vocab().values())

    def content_fingerprints(self, origin: Origin, location: DataLocation) -> list[Any]:
        """Returns what identifies the data itself, in the cache's key."""
        if location.kind == "files":
            return [[str(file), *cache.file_fingerprint(file)] for file in location.files]
        fingerprint = load_hugging_face(origin, location)._fingerprint
        files = [file for folder in location.files for file in sorted(folder.iterdir()) if file.is_file()]
        return [fingerprint, *map(cache.file_fingerprint, files)]

    def prepare_rows(
        self,
        origin: Origin,
        location: DataLocation,
        form: PromptFormat,
        folder: Path | None,
        rows: Iterator[DataRow | BadRow] | None = None,
    ) -> StoredDataset:
        """Renders, tokenizes and stores `rows`, by default all, in `folder` or in memory."""
        renderer, writer = PromptRenderer(form, self.tokenizer), RowWriter(folder)
        try:
            started = last_note = time.monotonic()
            for batch in split_batches(rows or read_rows(origin, location)):
                self.add_batch(origin, location.name, renderer, writer, batch)
                if time.monotonic() - last_note > NOTE_INTERVAL_S:
                    last_note = time.monotonic()
                    rate = writer.facts.read / (last_note - started)
                    self.note(f"{origin.path}: {writer.facts.read:,} rows prepared, {rate:,.0f} a second")
            writer.facts.own_system = renderer.own_system
            return writer.finish()
        except BaseException:
            writer.close()
            raise

    def add_batch(
        self,
        origin: Origin,
        default_source: str,
        renderer: PromptRenderer,
        writer: RowWriter,
        batch: list[DataRow | BadRow],
    ) -> None:
        usable: list[tuple[DataRow, dict[str, Any], RenderedPrompt]] = []
        turns: list[list[TurnText]] = []
        for row in batch:
            if isinstance(row, BadRow):
                writer.add_bad(row)
                continue
            try:
                prompt = renderer(row.fields)
                row_source = origin.source or str(row.fields.get("source") or default_source)
                record = make_record(row, prompt, row_source, renderer.form)
                if renderer.form.supervised:
                    turns.append(turn_texts(renderer, row.fields, prompt))
                usable.append((row, record, prompt))
            except UnusableRow as error:
                writer.add_bad(BadRow(row.file, row.line, error.reason, error.detail))
            except RecursionError:
                writer.add_bad(BadRow(row.file, row.line, "nested too deep", "the row is nested too deep."))
            except ConfigError as error:
                raise ConfigError(f"{row.location}: {error}") from None
        prompts = [prompt for _, _, prompt in usable]
        tokenized = self.tokenize(prompts)
        shown: Sequence[Demonstration | UnusableRow | None] = [None] * len(usable)
        if renderer.form.supervised:
            shown = tokenize_turns(self.tokenizer, prompts, tokenized, turns)
        records = []
        for (row, record, prompt), tokens, demonstration in zip(usable, tokenized, shown, strict=True):
            try:
                records.append(record | self.token_columns(renderer.form, prompt, tokens, demonstration))
            except UnusableRow as error:
                writer.add_bad(BadRow(row.file, row.line, error.reason, error.detail))
                continue
            if renderer.form.required and writer.facts.notes is None:
                writer.facts.notes = describe_end(origin.path, renderer, row.fields, prompt, tokens)
        writer.add(records)

    def token_columns(
        self, form: PromptFormat, prompt: RenderedPrompt, tokens: list[int], shown: Demonstration | UnusableRow | None
    ) -> dict[str, Any]:
        if isinstance(shown, UnusableRow):
            raise shown
        if not form.required:
            return {"tokens": [], "length": 0, "demonstration": None}
        if not tokens:
            raise UnusableRow("without tokens", f"the prompt {prompt.text[:80]!r} has no tokens.")
        more = sequence_of(shown) if shown else []
        if self.model_lacks_tokens and (unknown := max([*tokens, *more])) >= self.vocabulary:
            raise UnusableRow(
                "with tokens that the model lacks",
                f"the {'row' if shown else 'prompt'} has `{self.tokenizer.convert_ids_to_tokens(unknown)}`, token {unknown} of "
                f"the tokenizer, and the model's {self.vocabulary:,} tokens end at {self.vocabulary - 1}.",
            )
        length = len(tokens) + len(more)
        return {"tokens": tokens, "length": length, "demonstration": to_stored(shown) if shown else None}

    def tokenize(self, prompts: list[RenderedPrompt]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in prompts]
        for special in (True, False):
            chosen = [i for i, p in enumerate(prompts) if p.add_special_tokens is special]
            texts = [prompts[i].text for i in chosen]
            for i, ids in zip(chosen, tokenize_prompts(self.tokenizer, texts, add_special_tokens=special), strict=True):
                tokens[i] = ids
        return tokens


def make_record(row: DataRow, prompt: RenderedPrompt, source: str, form: PromptFormat) -> dict[str, Any]:
    """Returns the columns of `store.FIELDS` but those of tokens."""
    return {
        "file": row.file,
        "line": row.line,
        "hash": hash_number(to_canonical_json(row.fields), 6),
        "same": hash_number(prompt.text, 8),
        "source": replace_surrogates(source),
        "text": prompt.text,
        "messages": prompt.messages and to_json(prompt.messages),
        "row": to_json(reward_fields(row.fields, form)),
    }


def split_batches(rows: Iterator[DataRow | BadRow]) -> Iterator[list[DataRow | BadRow]]:
    """Splits rows into batches of at most `MAX_ROWS`, which end after `MAX_CHARACTERS`."""
    batch: list[DataRow | BadRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(v) for v in row.fields.values() if isinstance(v, str)) if isinstance(row, DataRow) else 0
        if len(batch) >= MAX_ROWS or size >= MAX_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def to_json(value: Any) -> str:
    """Returns a value as JSON. Dates become text in ISO form, decimals digits, and bytes base64."""
    return json.dumps(value, default=_to_text)


def to_canonical_json(fields: dict[str, Any]) -> str:
    """Returns the same text for the same row in any file: keys are sorted, nulls left out."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_to_text)
    if "null" in text:
        text = json.dumps(drop_nulls(json.loads(text)), sort_keys=True, separators=(",", ":"))
    return text


def hash_number(text: str, size: int) -> int:
    """Returns the first `size` bytes of the text's SHA-256 as a number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")


def _to_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
