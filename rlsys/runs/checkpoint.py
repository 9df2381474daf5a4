"""Checkpoints: written under another name, fsynced, hashed, and renamed when complete.

A checkpoint `step-000040` has a file `SHA256SUMS`, which shows whether it is intact, or which of its files is not.
Until it is complete its name is `.step-000040-3f9a01c7`, which no other attempt has: a process that outlives its run
cannot write into the checkpoint of the next.

step-000040/
    model/       Hugging Face directory            optimizer/  its state, by parameter; critic/ has both too
    reference/   weights of a refreshed reference
    state.json   where the run stands              pending/    batches that are sampled but not trained on yet
    SHA256SUMS   every file; `sha256sum -c SHA256SUMS` checks them too
"""

import contextlib
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlsys.errors import ConfigError
from rlsys.runs.batch_files import read_batch, write_batch
from rlsys.runs.disk import NOT_THERE, read_patiently, sync_folder, write_atomically
from rlsys.runs.state import RunState
from rlsys.types import Batch

_NAME = re.compile(r"step-(\d{6,})")
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_REPLACED = ".was-"
_REMOVED = ".gone-"
SUMS = "SHA256SUMS"
FORMAT = 1  # of state.json and pending/; it grows when an older rlsys cannot read them


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
        self.unfinished_dir = self.folder / f".step-{state.step:06d}-{uuid.uuid4().hex[:8]}"
        self.unfinished_dir.mkdir(parents=True)
        write_atomically(self.unfinished_dir / "state.json", json.dumps({"format": FORMAT} | state.to_json()))
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
            sync_folder(directory)
        if target.exists():  # of the same step, and perhaps the only checkpoint
            replaced = target.with_name(f"{_REPLACED}{target.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        self.unfinished_dir.rename(target)
        sync_folder(self.folder)
        self.step = None
        self.remove_old()
        return target

    def remove_old(self) -> None:
        """Removes what is not kept. What cannot be removed now, such as files in use on NFS, the next call tries again."""
        if self.keep_last:
            for step, old in list_checkpoints(self.folder)[: -self.keep_last]:
                if step != self.best:
                    with contextlib.suppress(OSError):  # renamed first: half of it must not be taken for a checkpoint
                        old.rename(old.with_name(f"{_REMOVED}{old.name}"))
        for removed in self.folder.glob(".*"):
            shutil.rmtree(removed, ignore_errors=True)

    def list_all(self) -> list[tuple[int, Path]]:
        return list_checkpoints(self.folder)

    @property
    def last_step(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        checkpoints = self.list_all()
        return checkpoints[-1][0] if checkpoints else 0

    def load_newest(self, note: Callable[[str], None]) -> SavedCheckpoint | None:
        """Reads the newest intact checkpoint. Damaged ones that are newer are reported and renamed.

        What a killed run was writing or removing is deleted. What it was about to replace gets its name back. Raises
        `ConfigError` if there are checkpoints and none can be used: a run never begins anew over its own results.
        """
        for replaced in self.folder.glob(f"{_REPLACED}step-*"):
            if not (target := replaced.with_name(replaced.name.removeprefix(_REPLACED))).exists():
                replaced.rename(target)
        for unfinished in self.folder.glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        damage_by_path: dict[Path, str] = {}
        for _, path in reversed(list_checkpoints(self.folder)):
            if damage := find_damage(path):
                damage_by_path[path] = damage
                continue
            checkpoint = read_checkpoint(path)
            for damaged, reason in damage_by_path.items():
                note(
                    f"the checkpoint {damaged.name} is damaged, and {path.name} is used: {reason}. {set_aside(damaged)}"
                )
            return checkpoint
        if damage_by_path:
            raise ConfigError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(damage_by_path.values())}. Restore one from a "
                "copy. To begin anew, choose another run.dir, or remove this one."
            )
        return None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns steps and directories of the checkpoints, oldest first. They were complete when they got their names."""
    names = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(m[1]), p) for m, p in names if m and p.is_dir())


def find_damage(checkpoint: Path) -> str:
    """Returns what is wrong with the first damaged file of a checkpoint; empty if all are as they were written.

    Raises `ConfigError` if a file cannot be read now, which says nothing about what it holds.
    """
    try:
        text = read_patiently((checkpoint / SUMS).read_bytes).decode()
        lines = [_LINE.fullmatch(line) for line in text.splitlines()]
        sums = {m[2]: m[1] for m in lines if m}
        if format_sums(sums) != text or "state.json" not in sums:
            return f"{checkpoint / SUMS} is not as it was written"
        for name, expected in sums.items():
            file = checkpoint / name
            if (actual := read_patiently(partial(sha256, file))) != expected:
                size = file.stat().st_size
                return f"{file} ({size} bytes) has SHA-256 {actual[:12]}… instead of {expected[:12]}…"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (UnicodeDecodeError, *NOT_THERE) as error:
        return f"{error}"
    except OSError as error:
        raise unreadable(checkpoint, error) from error
    return ""


def unreadable(checkpoint: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{error.filename or checkpoint} cannot be read: {error.strerror or error}. The checkpoint may be intact: try "
        f"again. If the disk has lost it for good, rename {checkpoint.name}, and the one before it is used."
    )


def require_undamaged(checkpoint: Path) -> None:
    """Raises `ConfigError` if a checkpoint is damaged, for commands that use this one and no other."""
    if damage := find_damage(checkpoint):
        raise ConfigError(f"the checkpoint {checkpoint} is damaged: {damage}. Use another one.")


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Reads the loop's own part of an intact checkpoint."""
    try:
        return SavedCheckpoint(path, read_state(path), read_patiently(lambda: read_pending(path)))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint {path} is intact, but another version of rlsys made it ({type(error).__name__}: {error}). "
            "Go on with that version, or choose another run.dir."
        ) from error


def read_state(checkpoint: Path) -> RunState:
    values = json.loads(read_patiently((checkpoint / "state.json").read_text))
    if (number := values.pop("format", FORMAT)) != FORMAT:
        raise ValueError(f"format {number} instead of {FORMAT}")
    return RunState.from_json(values)


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


def set_aside(damaged: Path) -> str:
    """Renames a damaged checkpoint, so that it is not looked at again. Returns where it is now."""
    target = damaged.with_name(f"damaged-{damaged.name}")
    shutil.rmtree(target, ignore_errors=True)
    damaged.rename(target)
    return f"It is now {target}."
