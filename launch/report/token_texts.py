"""What the tokens of a run are in words: its tokenizer, from its newest checkpoint or from the model it began with."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.tasks.zigzag import SYMBOLS

ANCHOR = "a"  # a token that is decoded before each other one: at the begin of a text some lose their blank
PRINTABLE_BYTES = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]  # bytes that a byte-level vocabulary writes as they are
OTHER_BYTES = [b for b in range(256) if b not in PRINTABLE_BYTES]
BYTE_BY_CHAR = {chr(b): b for b in PRINTABLE_BYTES} | {chr(256 + i): b for i, b in enumerate(OTHER_BYTES)}


def load_token_texts(run: Path, model: str) -> Callable[[list[int]], list[str]] | None:
    """A function from token ids to their texts, or None where the run's tokenizer is not on this machine."""
    if model == "builtin:tiny":
        return lambda ids: [SYMBOLS[i] if i < len(SYMBOLS) else f"‹{i}›" for i in ids]
    file = find_tokenizer(run, model)
    if file is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: [token_text(tokenizer, i) for i in ids]


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token where others stand before it; a part of a character is its bytes, as in ‹e2 82›."""
    before = tokenizer.encode(ANCHOR, add_special_tokens=False).ids[-1:]
    start = tokenizer.decode(before, skip_special_tokens=False)
    whole = tokenizer.decode([*before, token], skip_special_tokens=False)
    text = whole[len(start) :] if whole.startswith(start) else tokenizer.decode([token], skip_special_tokens=False)
    raw = tokenizer.id_to_token(token) or f"‹{token}›"
    return show_bytes(raw) if "\ufffd" in text else str(text or raw)


def show_bytes(raw: str) -> str:
    """ "<0xE2>" -> "‹e2›", and "âĤ" -> "‹e2 82›" """
    if single := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return f"‹{single[1].lower()}›"
    return f"‹{bytes(BYTE_BY_CHAR[c] for c in raw).hex(' ')}›" if all(c in BYTE_BY_CHAR for c in raw) else raw


def find_tokenizer(run: Path, model: str) -> Path | None:
    places = [p / "model" for p in sorted((run / "checkpoints").glob("step-*"), reverse=True)]
    places += [Path(model).expanduser()] if model else []
    found = next((p / "tokenizer.json" for p in places if (p / "tokenizer.json").is_file()), None)
    if found or not model:
        return found
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # no name that a hub would know
        return None
    return Path(cached) if isinstance(cached, str) else None
