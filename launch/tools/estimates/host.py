"""The memory of this machine that a process may use, where a control group limits it."""

import contextlib
from pathlib import Path

import psutil


def read_cgroup(name: str) -> int | None:
    """Reads a number of this process's control group, such as memory.max; None without a limit or a file."""
    for path in (Path("/sys/fs/cgroup") / name, *_own_group_file(name)):
        with contextlib.suppress(OSError):
            if (text := path.read_text().strip()).isdecimal():
                return int(text)
    return None


def _own_group_file(name: str) -> list[Path]:
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        return [Path("/sys/fs/cgroup") / group.strip("/") / name]
    return []


def usable_memory() -> tuple[int, int]:
    """Returns the main memory that this process may use, and how much of that is free, in bytes."""
    memory = psutil.virtual_memory()
    limit, used = read_cgroup("memory.max"), read_cgroup("memory.current")
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, min(memory.available, max(limit - (used or 0), 0))
