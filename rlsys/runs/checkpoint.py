"""Checkpoints: written beside, fsynced, proved by SHA-256, renamed. A directory `step-000040` with `SHA256SUMS` is whole, or says where not.

step-000040/
    model/       Hugging Face directory        optimizer/  state of the optimizer, by parameter      critic/   both, of the critic
    state.json   where the run is              pending/    batches that were sampled and not yet trained on
    SHA256SUMS   every file; `sha256sum -c SHA256SUMS` checks it too
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlsys.config.schema import ConfigError
from rlsys.runs.batch_files import read_batch, write_batch
from rlsys.runs.directory import write_atomically
from rlsys.runs.state import RunState
from rlsys.types import Batch

_NAME = re.compile(r"step-(\d{6,})")
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_WAS = ".was-"
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was read and is whole."""

    path: Path
    state: RunState
    pending: list[Batch]


class Checkpoints:
    """Those of a run. One at a time is being written: `begin`, then workers write, then `complete`."""

    def __init__(self, folder: Path, keep_last: int):
        self.folder, self.keep_last = folder, keep_last
        self.step: int | None = None  # of the one that is being written

    def begin(self, state: RunState, pending: list[Batch]) -> str:
        """Returns a hidden directory that holds the loop's own part; workers add theirs."""
        self.step, self.best = state.step, state.best.step
        self.unfinished_dir = self.folder / f".step-{state.step:06d}"
        shutil.rmtree(self.unfinished_dir, ignore_errors=True)
        self.unfinished_dir.mkdir(parents=True)
        write_atomically(self.unfinished_dir / "state.json", json.dumps(state.to_json()))
        for number, batch in enumerate(pending):
            write_batch(self.unfinished_dir / "pending" / f"{number:03d}", batch)
        own = {
            str(p.relative_to(self.unfinished_dir)): sha256(p) for p in self.unfinished_dir.rglob("*") if p.is_file()
        }
        self.sums = own
        return str(self.unfinished_dir)

    def complete(self, sums: dict[str, str]) -> Path:
        """Others have written these files, and flushed them to disk."""
        assert self.step is not None, "nothing was begun"
        target = self.folder / f"step-{self.step:06d}"
        write_atomically(self.unfinished_dir / SUMS, format_sums(self.sums | sums))
        for place in [p for p in self.unfinished_dir.rglob("*") if p.is_dir()] + [self.unfinished_dir]:
            _sync(place)
        was = target.with_name(f"{_WAS}{target.name}")  # of the same step, and the only one perhaps
        if target.exists():
            target.rename(was)
        self.unfinished_dir.rename(target)
        _sync(self.folder)
        shutil.rmtree(was, ignore_errors=True)
        self.step = None
        if self.keep_last:
            for step, old in list_checkpoints(self.folder)[: -self.keep_last]:
                if step != self.best:
                    _remove(old)
        return target

    def list_all(self) -> list[tuple[int, Path]]:
        return list_checkpoints(self.folder)

    @property
    def last_step(self) -> int:
        """The step of the newest that is in place; 0: there is none."""
        there = self.list_all()
        return there[-1][0] if there else 0

    def load_newest(self, tell: Callable[[str], None]) -> SavedCheckpoint | None:
        """The newest that is whole. A damaged one is named, and set aside; what a killed run was writing or removing goes, and what
        it was about to replace has its name again."""
        for was in self.folder.glob(f"{_WAS}step-*"):
            if not (target := was.with_name(was.name.removeprefix(_WAS))).exists():
                was.rename(target)
        for unfinished in self.folder.glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for step, path in reversed(list_checkpoints(self.folder)):
            damage = find_damage(path)
            if not damage:
                try:
                    return SavedCheckpoint(path, read_state(path), read_pending(path))
                except (
                    OSError,
                    ValueError,
                    KeyError,
                    TypeError,
                ) as error:  # whole, and yet not what we would have written
                    damage = f"{type(error).__name__}: {error}"
            aside = self.folder / f"damaged-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            tell(
                f"the checkpoint of step {step} is damaged: {damage}. It is now {aside}; an earlier one is used, or the run begins anew"
            )
        return None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and directories of the checkpoints, oldest first. They were whole when they got their names."""
    names = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(m[1]), p) for m, p in names if m and p.is_dir())


def find_damage(checkpoint: Path) -> str:
    """What is wrong with its files, naming the first; empty if every one is as it was written."""
    try:
        text = (checkpoint / SUMS).read_bytes().decode()
        lines = [_LINE.fullmatch(line) for line in text.splitlines()]
        sums = {m[2]: m[1] for m in lines if m}
        if format_sums(sums) != text or "state.json" not in sums:
            return f"{checkpoint / SUMS} is not as it was written"
        for name, expected in sums.items():
            if (found := sha256(checkpoint / name)) != expected:
                size = (checkpoint / name).stat().st_size
                return f"{checkpoint / name} ({size} bytes) has SHA-256 {found[:12]}… instead of {expected[:12]}…"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"{error}"
    return ""


def require_undamaged(checkpoint: Path) -> None:
    """For who uses one checkpoint and no other."""
    if damage := find_damage(checkpoint):
        raise ConfigError(f"the checkpoint {checkpoint} is damaged: {damage}. Use another one.")


def read_state(checkpoint: Path) -> RunState:
    """The loop's own part of a checkpoint."""
    return RunState.from_json(json.loads((checkpoint / "state.json").read_text()))


def read_pending(checkpoint: Path) -> list[Batch]:
    """Batches that were sampled from older weights and are still to be trained on, in order."""
    folder = checkpoint / "pending"
    names = sorted({p.stem for p in folder.iterdir()}) if folder.is_dir() else []
    return [read_batch(folder / name) for name in names]


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def _remove(checkpoint: Path) -> None:
    """Its name goes first: killed in between, what is left is not taken for a checkpoint."""
    gone = checkpoint.with_name(f".gone-{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
