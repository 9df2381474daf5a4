"""Where prepared data sets are kept between runs: `$XDG_CACHE_HOME/rlsys/data`, a folder for each. They may be removed at any time.

A folder is named for everything that decides what is in it, made aside and renamed when it is whole. Two runs may make the same
one at once: the second finds it there and uses it.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config.cache import cache_dir
from rlsys.config.schema import ConfigError
from rlsys.data.store import StoredDataset, open_stored

Note = Callable[[str], None]  # what tells a person
MAX_HASHED_BYTES = 16 << 20  # bytes; a larger file is known by path, size and time of change
SMALL_BYTES = 1 << 20  # bytes; what is smaller is prepared anew each time, in memory


def data_cache_dir() -> Path:
    return cache_dir() / "data"


def get_or_build(name: str, key: list[Any], make: Callable[[Path], StoredDataset], note: Note) -> StoredDataset:
    """What `make` fills a folder with, made once per key. Where the cache cannot be written, in a temporary folder."""
    words = json.dumps(key, sort_keys=True, default=str)
    place = data_cache_dir() / f"{name[:40]}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    found = _found(place)
    if found is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
    except OSError as error:
        note(
            f"{name}: the cache {place.parent} cannot be written ({error.strerror}); it is prepared in a temporary folder"
        )
        return _passing(name, make)
    try:
        made = make(beside)
        beside.chmod(0o755)
        try:
            beside.rename(place)
        except OSError:  # someone else was faster
            return _found(place) or made
        note(f"{name}: prepared for later runs too, in {place} ({made.facts.bytes / 2**20:,.0f} MiB)")
        return open_stored(place)
    except OSError as error:
        note(
            f"{name}: the cache {place.parent} cannot be written ({error.strerror}); it is prepared in a temporary folder"
        )
        return _passing(name, make)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _found(place: Path) -> StoredDataset | None:
    """A whole one; what is damaged is removed."""
    if not place.is_dir():
        return None
    try:
        return open_stored(place)
    except (OSError, ValueError, TypeError, KeyError):
        shutil.rmtree(place, ignore_errors=True)
        return None


def _passing(name: str, make: Callable[[Path], StoredDataset]) -> StoredDataset:
    """A folder without a name: it is gone when the process is."""
    try:
        aside = Path(tempfile.mkdtemp(prefix="rlsys-data-"))
    except OSError as error:
        raise ConfigError(f"{name}: no folder for the prepared data can be written: {error}.") from None
    try:
        made = make(aside)
        return replace(made, first_bad=made.read_all_bad(), bad_file=None)
    except OSError as error:
        raise ConfigError(
            f"{name}: the prepared data cannot be written, neither to {data_cache_dir()} nor to {aside.parent}: {error.strerror}. "
            "Make room, or name another disk in XDG_CACHE_HOME."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # the map stays open


def file_fingerprint(file: Path) -> list[Any]:
    """What a file is known by."""
    status = file.stat()
    if status.st_size > MAX_HASHED_BYTES:
        # The second time is the system's own: nobody can set it back, as copying programs do with the first.
        return [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return [status.st_size, hashlib.sha256(file.read_bytes()).hexdigest()]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """What decides the tokens it gives: vocabulary and rules, chat template, special tokens. Not where it was loaded from."""
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
    else:
        own = {k: v for k, v in tokenizer.init_kwargs.items() if k != "name_or_path"}
        rules = json.dumps([tokenizer.get_vocab(), own], sort_keys=True, default=str)
    parts = (type(tokenizer).__name__, rules, tokenizer.chat_template, tokenizer.special_tokens_map)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
