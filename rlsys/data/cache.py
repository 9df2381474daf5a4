"""The cache of prepared data sets: `$XDG_CACHE_HOME/rlsys/data`, a folder for each. It may be removed at any time.

The name of a folder depends on everything that decides its contents. It is filled under another name, and renamed when
it is complete. Two runs may fill the same folder at once: the second to finish uses the first one's.
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
from rlsys.data.store import StoredDataset, open_stored
from rlsys.errors import ConfigError

Note = Callable[[str], None]  # shows a line to the user
MAX_HASHED_BYTES = 16 << 20  # a larger file is identified by path, size and time of change
SMALL_BYTES = 1 << 20  # less data is prepared again each time, in memory


def data_cache_dir() -> Path:
    return cache_dir() / "data"


def get_or_build(name: str, key: list[Any], build: Callable[[Path], StoredDataset], note: Note) -> StoredDataset:
    """Returns the data set that `build` writes to a folder, built once per key.

    Where the cache cannot be written, the folder is a temporary one.
    """
    text = json.dumps(key, sort_keys=True, default=str)
    folder = data_cache_dir() / f"{name[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if (cached := _open_cached(folder)) is not None:
        return cached
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
        try:
            return _build_in_cache(name, folder, unfinished, build, note)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        problem = f"the cache {folder.parent} cannot be written ({error.strerror})"
        note(f"{name}: {problem}; the data is prepared in a temporary folder")
        return _build_temporarily(name, build)


def _build_in_cache(
    name: str, folder: Path, unfinished: Path, build: Callable[[Path], StoredDataset], note: Note
) -> StoredDataset:
    built = build(unfinished)
    unfinished.chmod(0o755)
    try:
        unfinished.rename(folder)
    except OSError:  # another run was faster
        return _open_cached(folder) or built
    note(f"{name}: prepared for later runs too, in {folder} ({built.facts.bytes / 2**20:,.0f} MiB)")
    return open_stored(folder)


def _open_cached(folder: Path) -> StoredDataset | None:
    """Opens a complete folder, or removes a damaged one."""
    if not folder.is_dir():
        return None
    try:
        return open_stored(folder)
    except (OSError, ValueError, TypeError, KeyError):
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _build_temporarily(name: str, build: Callable[[Path], StoredDataset]) -> StoredDataset:
    """Builds in a folder that is removed at once: its memory map stays open as long as the process lives."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="rlsys-data-"))
    except OSError as error:
        raise ConfigError(f"{name}: no folder for the prepared data can be written: {error}.") from None
    try:
        built = build(folder)
        return replace(built, first_bad=built.read_all_bad(), bad_file=None)
    except OSError as error:
        raise ConfigError(
            f"{name}: the prepared data cannot be written, neither to {data_cache_dir()} nor to {folder.parent}: "
            f"{error.strerror}. Make room, or name another disk in XDG_CACHE_HOME."
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def file_fingerprint(file: Path) -> list[Any]:
    """Returns what identifies a file and its contents."""
    status = file.stat()
    if status.st_size > MAX_HASHED_BYTES:
        # Programs that copy files may set the time of modification back, but not the time of change.
        return [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return [status.st_size, hashlib.sha256(file.read_bytes()).hexdigest()]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hashes what decides a tokenizer's tokens: vocabulary, rules, chat template, special tokens. Not its path."""
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
    else:
        settings = {k: v for k, v in tokenizer.init_kwargs.items() if k != "name_or_path"}
        rules = json.dumps([tokenizer.get_vocab(), settings], sort_keys=True, default=str)
    parts = (type(tokenizer).__name__, rules, tokenizer.chat_template, tokenizer.special_tokens_map)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
