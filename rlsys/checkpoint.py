"""Checkpoints: whole or not there. Written beside, synced to disk, renamed, then old ones removed."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.run_directory import write

_NAME = re.compile(r"step-(\d{6,})")


def save(folder: Path, step: int, state: dict[str, Any], fill: Callable[[str], None], keep_last: int) -> Path:
    """`fill(directory)` writes the weights; `state` is the loop's own."""
    target, beside = folder / f"step-{step:06d}", folder / f".step-{step:06d}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    fill(str(beside))
    write(beside / "state.json", json.dumps(state))
    for place in [*beside.rglob("*"), beside]:
        _sync(place)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    _sync(folder)
    if keep_last:
        for _, old in found(folder)[:-keep_last]:
            shutil.rmtree(old)
    return target


def found(folder: Path) -> list[tuple[int, Path]]:
    """Steps and directories of the whole checkpoints, oldest first."""
    names = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(m[1]), p) for m, p in names if m and (p / "state.json").is_file())


def state(checkpoint: Path) -> dict[str, Any]:
    """The loop's own part of a checkpoint."""
    found: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return found


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
