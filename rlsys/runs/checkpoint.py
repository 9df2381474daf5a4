"""Checkpoints: written under another name, fsynced, hashed, and renamed when complete.

A checkpoint `step-000040` has a file `SHA256SUMS`, which shows whether it is intact, or which of its files is not.

step-000040/
    model/       Hugging Face directory            optimizer/  its state, by parameter; critic/ has both too
    reference/   weights of a refreshed reference
    state.json   where the run stands              pending/    batches that are sampled but not trained on yet
    SHA256SUMS   every file; `sha256sum -c SHA256SUMS` checks them too
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
_REPLACED = ".was-"
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class SavedCheckpoint:
    """An intact checkpoint, read from disk."""

    path: Path
    state: RunState
    pending: list[Batch]


class Checkpoints:
    """The checkpoints of a run. One is written at a time: `begin`, then the workers write, then `complete`."""

    def __init__(self, folder: Path, keep_last: int):
        self.folder, self.keep_last = folder, keep_last
        self.step: int | None = None  # of the checkpoint being written

    def begin(self, state: RunState, pending: list[Batch]) -> str:
        """Returns a hidden directory that holds the loop's own part; workers add theirs."""
        self.step, self.best = state.step, state.best.step
        self.unfinished_dir = self.folder / f".step-{state.step:06d}"
        shutil.rmtree(self.unfinished_dir, ignore_errors=True)
        self.unfinished_dir.mkdir(parents=True)
        write_atomically(self.unfinished_dir / "state.json", json.dumps(state.to_json()))
        for number, batch in enumerate(pending):
            write_batch(self.unfinished_dir / "pending" / f"{number:03d}", batch)
        files = [p for p in self.unfinished_dir.rglob("*") if p.is_file()]
        self.sums = {str(p.relative_to(self.unfinished_dir)): sha256(p) for p in files}
        return str(self.unfinished_dir)

    def complete(self, sums: dict[str, str]) -> Path:
        """Gives the checkpoint its name. The workers have written the files in `sums` and flushed them to disk."""
        assert self.step is not None, "begin() comes first"
        target = self.folder / f"step-{self.step:06d}"
        write_atomically(self.unfinished_dir / SUMS, format_sums(self.sums | sums))
        for directory in [p for p in self.unfinished_dir.rglob("*") if p.is_dir()] + [self.unfinished_dir]:
            _sync(directory)
        replaced = target.with_name(f"{_REPLACED}{target.name}")  # of the same step, and perhaps the only checkpoint
        if target.exists():
            target.rename(replaced)
        self.unfinished_dir.rename(target)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
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
        """The step of the newest complete checkpoint; 0 if there is none."""
        checkpoints = self.list_all()
        return checkpoints[-1][0] if checkpoints else 0

    def load_newest(self, note: Callable[[str], None]) -> SavedCheckpoint | None:
        """Reads the newest intact checkpoint. A damaged one is reported and renamed.

        What a killed run was writing or removing is deleted. What it was about to replace gets its name back.
        """
        for replaced in self.folder.glob(f"{_REPLACED}step-*"):
            if not (target := replaced.with_name(replaced.name.removeprefix(_REPLACED))).exists():
                replaced.rename(target)
        for unfinished in self.folder.glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for step, path in reversed(list_checkpoints(self.folder)):
            damage = find_damage(path)
            if not damage:
                try:
                    return SavedCheckpoint(path, read_state(path), read_pending(path))
                except (OSError, ValueError, KeyError, TypeError) as error:  # intact, but not in this version's form
                    damage = f"{type(error).__name__}: {error}"
            damaged = self.folder / f"damaged-{path.name}"
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
            note(
                f"the checkpoint of step {step} is damaged: {damage}. It is now {damaged}; an earlier one is used, "
                "or the run begins anew"
            )
        return None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns steps and directories of the checkpoints, oldest first. They were complete when they got their names."""
    names = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(m[1]), p) for m, p in names if m and p.is_dir())


def find_damage(checkpoint: Path) -> str:
    """Returns what is wrong with the first damaged file of a checkpoint; empty if all are as they were written."""
    try:
        text = (checkpoint / SUMS).read_bytes().decode()
        lines = [_LINE.fullmatch(line) for line in text.splitlines()]
        sums = {m[2]: m[1] for m in lines if m}
        if format_sums(sums) != text or "state.json" not in sums:
            return f"{checkpoint / SUMS} is not as it was written"
        for name, expected in sums.items():
            if (actual := sha256(checkpoint / name)) != expected:
                size = (checkpoint / name).stat().st_size
                return f"{checkpoint / name} ({size} bytes) has SHA-256 {actual[:12]}… instead of {expected[:12]}…"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"{error}"
    return ""


def require_undamaged(checkpoint: Path) -> None:
    """Raises `ConfigError` if a checkpoint is damaged, for commands that use this one and no other."""
    if damage := find_damage(checkpoint):
        raise ConfigError(f"the checkpoint {checkpoint} is damaged: {damage}. Use another one.")


def read_state(checkpoint: Path) -> RunState:
    """Reads the loop's own part of a checkpoint."""
    return RunState.from_json(json.loads((checkpoint / "state.json").read_text()))


def read_pending(checkpoint: Path) -> list[Batch]:
    """Reads the batches that are sampled but not trained on yet, in order."""
    folder = checkpoint / "pending"
    names = sorted({p.stem for p in folder.iterdir()}) if folder.is_dir() else []
    return [read_batch(folder / name) for name in names]


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def _remove(checkpoint: Path) -> None:
    """Renames before it deletes: after a kill in between, the rest is not taken for a checkpoint."""
    removed = checkpoint.with_name(f".gone-{checkpoint.name}")
    shutil.rmtree(removed, ignore_errors=True)
    checkpoint.rename(removed)
    shutil.rmtree(removed)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
