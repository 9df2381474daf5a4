"""Puts files on disk so that they outlast a power failure, and reads them from disks that fail now and then."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

RETRIES_S = (0.1, 0.5, 2.0)  # waits before a failed read is tried again: a file server may be back by then
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # no other read would bring the file back
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)  # of CIFS and some FUSE file systems

Result = TypeVar("Result")


def write_atomically(file: Path, text: str) -> None:
    """Writes a file so that even after a crash it is the old one or the new one, never a part of either."""
    unfinished = file.with_name(f".{file.name}.tmp")
    write_synced(unfinished, text.encode())
    unfinished.rename(file)


def write_synced(file: Path, data: bytes) -> None:
    """Writes a file, and returns when it is on disk."""
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync_file(file: Path) -> None:
    """Returns when all that was written to a file is on disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on disk. A file system that cannot promise this keeps them as it does."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def read_patiently(read: Callable[[], Result]) -> Result:
    """Reads again a few times if the disk or the file server fails. Raises the last `OSError`."""
    for wait_s in RETRIES_S:
        try:
            return read()
        except NOT_THERE:
            raise
        except OSError:
            time.sleep(wait_s)
    return read()
