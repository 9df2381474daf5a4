"""Prompts from files: read, checked, tokenized, and dealt in an order that depends on nothing but the seed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys import tiny
from rlsys.config import ConfigError
from rlsys.types import Prompt


class Dataset:
    """Tokenized prompts. `take(position, count)` is the training stream: a new order each epoch, without an end."""

    def __init__(self, prompts: list[Prompt], *, seed: int = 0, shuffle: bool = True, skipped: int = 0):
        self.prompts, self.seed, self.shuffle, self.skipped = prompts, seed, shuffle, skipped
        self._epoch, self._order = -1, list(range(len(prompts)))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.tokens) for p in self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, position: int, count: int) -> list[Prompt]:
        """`count` prompts from `position` on, each with the uid of this use of its row."""
        taken = []
        for p in range(position, position + count):
            epoch, i = divmod(p, len(self.prompts))
            row = self.prompts[self._shuffled(epoch)[i]]
            taken.append(Prompt(f"{row.uid}#{epoch}", row.source, row.text, row.tokens, row.row))
        return taken

    def _shuffled(self, epoch: int) -> list[int]:
        if self.shuffle and epoch != self._epoch:
            self._order = list(range(len(self.prompts)))
            random.Random(f"{self.seed} epoch {epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order


def load(
    path: str,
    tokenizer: Any,
    *,
    prompt_key: str,
    max_prompt_tokens: int,
    limit: str = "rollout.max_prompt_tokens",
    overlong: str = "error",
    seed: int = 0,
    shuffle: bool = True,
) -> Dataset:
    """Reads a data set whole. Every problem is a `ConfigError` with file, line and reason."""
    prompts: list[Prompt] = []
    skipped = 0
    for where, row in rows(path, prompt_key):
        name, _, line = where.rpartition(":")
        source = str(row.get("source") or Path(name).stem)
        text, tokens = encode(row[prompt_key], tokenizer, where)
        if len(tokens) > max_prompt_tokens:
            if overlong == "error":
                raise ConfigError(
                    f"{where}: the prompt has {len(tokens)} tokens; at most {max_prompt_tokens} fit ({limit}). "
                    "Shorten it, or set data.overlong=skip to leave such prompts out."
                )
            skipped += 1
            continue
        facts = {k: v for k, v in row.items() if k not in (prompt_key, "source")}
        prompts.append(Prompt(f"{source}:{line}", source, text, tokens, facts))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts: all {skipped} are longer than {max_prompt_tokens} tokens.")
    return Dataset(prompts, seed=seed, shuffle=shuffle, skipped=skipped)


def rows(path: str, prompt_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(file:line, row)`, each row with a prompt, at least one of them."""
    line = 0
    for line, (where, row) in enumerate(read(path), 1):  # noqa: B007
        if prompt_key not in row:
            raise ConfigError(
                f"{where}: the row has no field `{prompt_key}`; it has {', '.join(row) or 'none'}. "
                "Set data.prompt_key to the field with the prompt."
            )
        yield where, row
    if not line:
        raise ConfigError(f"{path} holds no prompts; it is empty.")


def peek(path: str, prompt_key: str) -> None:
    """Looks at the first row: what is wrong with every row is said before anything is started."""
    next(rows(path, prompt_key))


def encode(prompt: Any, tokenizer: Any, where: str) -> tuple[str, list[int]]:
    """Text as it is; chat messages through the tokenizer's template, with the opening of the answer."""
    if isinstance(prompt, str) and prompt:
        text = prompt
    elif (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    ):
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template. Use plain text prompts."
            )
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise what it likes
            raise ConfigError(f"{where}: the tokenizer's chat template refuses these messages: {error}") from error
        return text, list(tokenizer.encode(text, add_special_tokens=False))
    else:
        raise ConfigError(
            f"{where}: a prompt is a text or a list of {{role, content}} messages, and not empty; this one is {str(prompt)[:80]!r}."
        )
    tokens = list(tokenizer.encode(text))
    if not tokens:
        raise ConfigError(f"{where}: the prompt {text[:80]!r} has no tokens.")
    return text, tokens


def read(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(file:line, row)` of a .jsonl or .parquet file or a built-in task."""
    if path.startswith("builtin:"):
        name = path.partition(":")[2]
        for i, row in enumerate(tiny.rows(name)):
            yield f"{name}:{i + 1}", row
        return
    file = Path(path).expanduser()
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            table = parquet.ParquetFile(file)
        except Exception as error:
            raise ConfigError(f"{path} is not a readable parquet file: {error}") from None
        line = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                line += 1
                yield f"{path}:{line}", row
        return
    with file.open("rb") as lines:
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{line}: not JSON: {error.msg} at column {error.colno}.") from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{line}: not UTF-8: {error.reason} at byte {error.start + 1}.") from None
            if not isinstance(row, dict):
                raise ConfigError(
                    f'{path}:{line}: a row is an object such as {{"prompt": "…"}}; this one is {text.decode().strip()[:60]}.'
                )
            yield f"{path}:{line}", row
