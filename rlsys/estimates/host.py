"""What of this machine a process may use, where a control group lets it have less than there is."""

import contextlib
from pathlib import Path

import psutil


def read_cgroup(name: str) -> int | None:
    """A number of this process's own group, such as memory.max; None where there is no limit, or no file."""
    for path in (Path("/sys/fs/cgroup") / name, *_own(name)):
        with contextlib.suppress(OSError):
            if (text := path.read_text().strip()).isdecimal():
                return int(text)
    return None


def _own(name: str) -> list[Path]:
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        return [Path("/sys/fs/cgroup") / own.strip("/") / name]
    return []


def usable_memory() -> tuple[int, int]:
    """What may be used of it in all, and what is free of that; bytes."""
    there = psutil.virtual_memory()
    limit, used = read_cgroup("memory.max"), read_cgroup("memory.current")
    if limit is None or limit >= there.total:
        return there.total, there.available
    return limit, min(there.available, max(limit - (used or 0), 0))
