"""Writes a trainer's state while it trains on.

driver                     each rank                              its thread
save(folder) ────────────▶ copies its share, begins ────────────▶ writes, fsyncs, reads back, hashes
             ◀─ at once ─
saved(wait=False) ───────▶ None: still being written
saved(wait=True) ────────▶ waits ◀─────────────────────────────── {file: SHA-256}, or what went wrong
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.learner.tensor_files import sync_and_hash, write_tensors


@dataclass(frozen=True)
class WriteError:
    """An `OSError` as an answer: raised in a worker, it would reach the driver as words."""

    code: int | None
    message: str
    file: str


SaveResult = dict[str, str] | WriteError | None  # None: still being written


class CheckpointWriter:
    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.hashes: dict[str, str] = {}
        self.error: WriteError | Exception | None = None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.thread:
            self.thread.join()

    def start(
        self,
        folder: Path,
        tensors: dict[str, dict[str, Any]],
        others: Mapping[str, Callable[[Path], None]] | None = None,
    ) -> None:
        """`tensors` by file; `others` fill a directory below `folder` with small files. Nobody may change the tensors any more."""
        self.wait()
        self.hashes, self.error = {}, None
        # A daemon: a process that ends does not wait for what nobody will ask for.
        self.thread = threading.Thread(
            target=self._run, args=(folder, tensors, others or {}), name="state writer", daemon=True
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

    def _run(self, folder: Path, tensors: dict[str, Any], others: Mapping[str, Callable[[Path], None]]) -> None:
        file = folder
        try:
            for name in {*others, *(str(Path(name).parent) for name in tensors)}:
                (folder / name).mkdir(parents=True, exist_ok=True)
            for name in list(tensors):
                file = folder / name
                self.hashes[name] = write_tensors(file, tensors.pop(name))
            for name, fill in others.items():
                file = folder / name
                fill(file)
                for file in sorted(p for p in (folder / name).rglob("*") if p.is_file()):
                    if (path := str(file.relative_to(folder))) not in self.hashes:
                        self.hashes[path] = sync_and_hash(file)
            for place in {folder, *((folder / name).parent for name in self.hashes)}:
                descriptor = os.open(place, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        except OSError as error:
            # A full disk does not say which file it had no room for.
            self.error = WriteError(error.errno, error.strerror or str(error), str(error.filename or file))
        except Exception as error:
            self.error = error


def merge_results(answers: list[SaveResult]) -> dict[str, str] | None:
    """The ranks' answers as one. None: some rank is still writing."""
    for answer in answers:
        if isinstance(answer, WriteError):
            raise OSError(answer.code, answer.message, answer.file)
    if any(answer is None for answer in answers):
        return None
    return {name: digest for answer in answers if isinstance(answer, dict) for name, digest in answer.items()}
