"""Writes a rank's share of a checkpoint while training goes on.

driver                     each rank                              its thread
save(folder) ────────────▶ copies its share, starts ────────────▶ writes, fsyncs, reads back, hashes
             ◀─ at once ─
saved_files(wait=False) ─▶ None: still being written
saved_files(wait=True) ──▶ waits ◀─────────────────────────────── {file: SHA-256}, or the error
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.runs.disk import sync_folder
from workers.learner.files.tensor_files import sync_and_hash, write_tensors

Tensors = dict[str, dict[str, Any]]  # by file, then by name
FillDirectory = Callable[[Path], None]


@dataclass(frozen=True)
class WriteError:
    """An `OSError` as a value. If a worker raised it, Ray would turn it into text on the way to the driver."""

    code: int | None
    message: str
    file: str


SaveResult = dict[str, str] | WriteError | None  # SHA-256 by file; None: still being written


class CheckpointWriter:
    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.hashes: dict[str, str] = {}
        self.error: WriteError | Exception | None = None

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self.thread:
            self.thread.join()

    def start(self, folder: Path, tensors: Tensors, directories: Mapping[str, FillDirectory] | None = None) -> None:
        """Starts to write. `directories`: functions that fill a directory below `folder` with small files, by its name.

        From now on nobody may change the tensors.
        """
        self.wait()
        self.hashes, self.error = {}, None
        # A daemon thread: a process that ends does not wait for a checkpoint that nobody will ask for.
        self.thread = threading.Thread(
            target=self._run, args=(folder, tensors, directories or {}), name="checkpoint writer", daemon=True
        )
        self.thread.start()

    def result(self, wait: bool) -> SaveResult:
        if wait:
            self.wait()
        if self.thread and self.thread.is_alive():
            return None
        if isinstance(self.error, Exception):
            raise self.error
        return self.error or self.hashes

    def _run(self, folder: Path, tensors: Tensors, directories: Mapping[str, FillDirectory]) -> None:
        self.file = folder
        try:
            self._write(folder, tensors, directories)
        except OSError as error:
            # The error of a full disk does not name the file that did not fit.
            self.error = WriteError(error.errno, error.strerror or str(error), str(error.filename or self.file))
        except Exception as error:
            self.error = error

    def _write(self, folder: Path, tensors: Tensors, directories: Mapping[str, FillDirectory]) -> None:
        for name in {*directories, *(str(Path(name).parent) for name in tensors)}:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in list(tensors):
            self.file = folder / name
            self.hashes[name] = write_tensors(self.file, tensors.pop(name))
        for name, fill in directories.items():
            self.file = folder / name
            fill(self.file)
            # Tensors are written above, or at the same time by other ranks.
            for file in sorted(p for p in (folder / name).rglob("*") if p.is_file() and p.suffix != ".safetensors"):
                self.file = file
                self.hashes[str(file.relative_to(folder))] = sync_and_hash(file)
        for directory in {folder, *((folder / name).parent for name in self.hashes)}:
            sync_folder(directory)


def merge_results(results: list[SaveResult]) -> dict[str, str] | None:
    """Returns the hashes of all ranks' files. None: a rank is still writing. Raises the first rank's `OSError`."""
    for result in results:
        if isinstance(result, WriteError):
            raise OSError(result.code, result.message, result.file)
    if any(result is None for result in results):
        return None
    return {name: digest for result in results if isinstance(result, dict) for name, digest in result.items()}
