"""A disk that fails, and a machine that ends, at any of the few calls through which a run writes and reads.

Where the driver opens, flushes, renames or removes a file, the disk may refuse: EIO, ENOSPC or ESTALE, once or for a while.
Or the process ends there (SIGKILL), with a half-written file; or the power fails, and what was not flushed is cut off.
"""

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.runs import disk

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)
REAL = {"open": Path.open, "rename": Path.rename, "fsync": os.fsync, "rmtree": shutil.rmtree}


class Killed(BaseException):
    """The process ends here: nothing that it does afterwards reaches the disk."""


class FailingDisk:
    """All below `folder`. `on_call(name)` is told each call first; `on_rename(target)` each rename that succeeded."""

    def __init__(self, folder: Path, rng: random.Random, log: Callable[[str], None], flushed: dict[int, int]):
        self.folder, self.rng, self.log = str(folder), rng, log
        self.calls = 0
        self.plans: dict[int, Callable[[], None]] = {}  # at which call something happens
        self.dead = self.alone = False
        self.error, self.errors_left, self.failed = 0, 0, 0
        self.flushed = flushed  # bytes that outlast a power failure, by inode
        self.on_rename: Callable[[Path], None] = lambda target: None

    def fail(self, error: int, count: int) -> None:
        """From now on so many calls fail."""
        self.error, self.errors_left = error, count

    def kill(self) -> None:
        self.dead = True

    def call(self, name: str, path: object) -> None:
        """Raises what the disk does instead."""
        if self.dead:
            raise Killed
        if self.alone:
            return
        self.calls += 1
        if plan := self.plans.pop(self.calls, None):
            self.log(f"at call {self.calls} of the disk: {name} {str(path).removeprefix(self.folder)}")
            plan()
        if self.dead:
            raise Killed
        if self.errors_left:
            self.errors_left -= 1
            self.failed += 1
            self.log(f"{errno.errorcode[self.error]} at {name} {str(path).removeprefix(self.folder)}")
            raise OSError(self.error, os.strerror(self.error), str(path))

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Meanwhile nothing fails: the test itself reads."""
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def lose_power(self) -> None:
        """Cuts off what was written and not flushed."""
        for file in Path(self.folder).rglob("*"):
            if file.is_file():
                size, kept = file.stat().st_size, self.flushed.get(file.stat().st_ino, 0)
                if size > kept:
                    os.truncate(file, self.rng.randint(kept, size))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        ours = self.folder

        def path_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(ours):
                self.call(f"open {mode}", path)
            return REAL["open"](path, mode, *arguments, **options)  # type: ignore[operator]

        def rename(path: Path, target: Path) -> Path:
            if not str(path).startswith(ours):
                return path.rename(target)
            self.call("rename", path)
            renamed = REAL["rename"](path, target)  # type: ignore[operator]
            self.on_rename(target)
            return renamed

        def fsync(descriptor: int) -> None:
            try:
                self.call("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            except BaseException:
                self.tear(descriptor)
                raise
            facts = os.fstat(descriptor)
            self.flushed[facts.st_ino] = facts.st_size

        def rmtree(path: Path, ignore_errors: bool = False, **options: Any) -> None:
            if str(path).startswith(ours) and not ignore_errors:
                self.call("rmtree", path)
            elif self.dead:
                raise Killed
            REAL["rmtree"](path, ignore_errors, **options)

        Path.open, Path.rename, os.fsync, shutil.rmtree = path_open, rename, fsync, rmtree  # type: ignore
        waits, disk.RETRIES_S = disk.RETRIES_S, (0.0,) * len(disk.RETRIES_S)
        try:
            yield
        finally:
            for owner, name in ((Path, "open"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
                setattr(owner, name, REAL[name])
            disk.RETRIES_S = waits

    def tear(self, descriptor: int) -> None:
        """A write that failed may have reached the disk in part."""
        with contextlib.suppress(OSError):  # opened for reading
            size = os.fstat(descriptor).st_size
            kept = self.flushed.get(os.fstat(descriptor).st_ino, 0)
            os.ftruncate(descriptor, self.rng.randint(min(kept, size), size))
