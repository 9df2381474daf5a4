"""The texts of a run's tokens: from its tokenizer, in the newest checkpoint or in the model it started from."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.tasks.builtin import TINY_MODELS

ANCHOR = "a"  # decoded before each token: at the start of a text some tokens lose their blank
PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as they are in a byte-level vocabulary
OTHER_BYTES = [b for b in range(256) if b not in PRINTABLE_BYTES]
BYTE_BY_CHAR = {chr(b): b for b in PRINTABLE_BYTES} | {chr(256 + i): b for i, b in enumerate(OTHER_BYTES)}


def load_token_texts(run: Path, model: str) -> Callable[[list[int]], list[str]] | None:
    """Returns a function from token ids to their texts, or None if the run's tokenizer is not on this machine."""
    if model in TINY_MODELS:
        symbols = TINY_MODELS[model].symbols
        return lambda ids: [symbols[i] if i < len(symbols) else f"‹{i}›" for i in ids]
    file = find_tokenizer(run, model)
    if file is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: [token_text(tokenizer, i) for i in ids]


def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token in the middle of a text; bytes such as ‹e2 82› for a part of a character."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False).ids[-1:]
    prefix = tokenizer.decode(anchor, skip_special_tokens=False)
    both = tokenizer.decode([*anchor, token], skip_special_tokens=False)
    text = both[len(prefix) :] if both.startswith(prefix) else tokenizer.decode([token], skip_special_tokens=False)
    raw = tokenizer.id_to_token(token) or f"‹{token}›"
    return show_bytes(raw) if "\ufffd" in text else str(text or raw)


def show_bytes(raw: str) -> str:
    """Writes a token of the vocabulary as bytes.  "<0xE2>" -> "‹e2›";  "âĤ" -> "‹e2 82›" """
    if single := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return f"‹{single[1].lower()}›"
    return f"‹{bytes(BYTE_BY_CHAR[c] for c in raw).hex(' ')}›" if all(c in BYTE_BY_CHAR for c in raw) else raw


def find_tokenizer(run: Path, model: str) -> Path | None:
    folders = [p / "model" for p in sorted((run / "checkpoints").glob("step-*"), reverse=True)]
    folders += [Path(model).expanduser()] if model else []
    file = next((p / "tokenizer.json" for p in folders if (p / "tokenizer.json").is_file()), None)
    if file or not model:
        return file
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # not a valid name on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None
