"""One pass over a data set: read ─▶ render ─▶ tokenize ─▶ store. Memory does not grow with the data."""

import base64
import datetime
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.data import cache
from rlsys.data.cache import Note
from rlsys.data.origin import DataLocation, Origin, locate_data
from rlsys.data.readers import BadRow, DataRow, load_hugging_face, read_rows
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
from rlsys.text import replace_surrogates

VERSION = 3  # of what is stored; another one prepares anew
ROWS, CHARACTERS = 1000, 4_000_000  # tokenized together, at most
PATIENCE_S = 10.0  # between notes


class DatasetPreparer:
    """`Preparation(tokenizer, note)(origin, form)` is a data set ready to be chosen from."""

    def __init__(self, tokenizer: Any, note: Note):
        self.tokenizer, self.note = tokenizer, note

    def __call__(self, origin: Origin, form: PromptFormat) -> StoredDataset:
        place = locate_data(origin)
        if place.kind == "builtin" or (
            place.kind == "files" and sum(f.stat().st_size for f in place.files) < cache.SMALL_BYTES
        ):
            return self.prepare_rows(origin, place, form, None)
        template = form.template and read_template(form.template)
        key = [
            VERSION,
            asdict(origin),
            asdict(form),
            template,
            self.fingerprint,
            *self.content_fingerprints(origin, place),
        ]
        return cache.get_or_build(
            place.name, key, lambda folder: self.prepare_rows(origin, place, form, folder), note=self.note
        )

    @cached_property
    def fingerprint(self) -> str:
        return cache.tokenizer_fingerprint(self.tokenizer)

    def content_fingerprints(self, origin: Origin, place: DataLocation) -> list[Any]:
        if place.kind == "files":
            return [[str(file), *cache.file_fingerprint(file)] for file in place.files]
        fingerprint = load_hugging_face(origin, place)._fingerprint
        files = [file for folder in place.files for file in sorted(folder.iterdir()) if file.is_file()]
        return [fingerprint, *map(cache.file_fingerprint, files)]

    def prepare_rows(
        self, origin: Origin, place: DataLocation, form: PromptFormat, folder: Path | None
    ) -> StoredDataset:
        renderer, writer = PromptRenderer(form, self.tokenizer), RowWriter(folder)
        try:
            began = said = time.monotonic()
            for batch in batches(read_rows(origin, place)):
                self.add_batch(origin, place, renderer, writer, batch)
                if time.monotonic() - said > PATIENCE_S:
                    said = time.monotonic()
                    rate = writer.facts.read / (said - began)
                    self.note(f"{origin.path}: {writer.facts.read:,} rows prepared, {rate:,.0f} a second")
            writer.facts.own_system = renderer.own_system
            return writer.finish()
        except BaseException:
            writer.close()
            raise

    def add_batch(
        self,
        origin: Origin,
        place: DataLocation,
        renderer: PromptRenderer,
        writer: RowWriter,
        batch: list[DataRow | BadRow],
    ) -> None:
        usable: list[tuple[dict[str, Any], RenderedPrompt]] = []
        for row in batch:
            if isinstance(row, BadRow):
                writer.add_bad(row)
                continue
            try:
                asked = renderer(row.fields)
                source = origin.source or str(row.fields.get("source") or place.name)
                record: dict[str, Any] = {
                    "file": row.file,
                    "line": row.line,
                    "hash": hash_number(to_canonical_json(row.fields), 6),
                    "same": hash_number(asked.text, 8),
                    "source": replace_surrogates(source),
                    "text": asked.text,
                    "messages": asked.messages and to_json(asked.messages),
                    "row": to_json(reward_fields(row.fields, renderer.form)),
                }
            except UnusableRow as error:
                writer.add_bad(BadRow(row.file, row.line, error.reason, error.detail))
            except RecursionError:
                writer.add_bad(BadRow(row.file, row.line, "nested too deep", "the row is nested too deep."))
            except ConfigError as error:
                raise ConfigError(f"{row.location}: {error}") from None
            else:
                usable.append((record, asked))
        records = []
        for (record, asked), tokens in zip(usable, self.tokenize([asked for _, asked in usable]), strict=True):
            if tokens:
                records.append(record | {"tokens": tokens, "length": len(tokens)})
            else:
                said = f"the prompt {asked.text[:80]!r} has no tokens."
                writer.add_bad(BadRow(record["file"], record["line"], "without tokens", said))
        writer.add(records)

    def tokenize(self, asked: list[RenderedPrompt]) -> list[list[int]]:
        """Of many texts at once, which keeps all cores busy."""
        found: list[list[int]] = [[] for _ in asked]
        for special in (True, False):
            places = [i for i, a in enumerate(asked) if a.add_special_tokens is special]
            if places:
                encoded = self.tokenizer(
                    [asked[i].text for i in places],
                    add_special_tokens=special,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )
                for i, tokens in zip(places, encoded["input_ids"], strict=True):
                    found[i] = tokens
        return found


def batches(rows: Iterator[DataRow | BadRow]) -> Iterator[list[DataRow | BadRow]]:
    batch: list[DataRow | BadRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(v) for v in row.fields.values() if isinstance(v, str)) if isinstance(row, DataRow) else 0
        if len(batch) >= ROWS or size >= CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def to_json(value: Any) -> str:
    """As JSON. What JSON does not know becomes text: dates in ISO form, decimals in digits, bytes in base64."""
    return json.dumps(value, default=_other)


def to_canonical_json(fields: dict[str, Any]) -> str:
    """The same text for the same row, wherever it stands: fields in order, and nothing where there is nothing."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_other)
    if "null" in text:
        text = json.dumps(drop_nulls(json.loads(text)), sort_keys=True, separators=(",", ":"))
    return text


def hash_number(text: str, size: int) -> int:
    """The first bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big")


def _other(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
