"""Keeps two runs out of one directory."""

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from rlsys.errors import ConfigError


def lock_run(folder: Path) -> IO[str]:
    """Locks a run directory until the file is closed. Raises `ConfigError` if another run has it, or `OSError`.

    A file system without locks (some Lustre, FUSE) is not refused. There the file names the process, and a second run
    on the same host is found by that; one on another host is not.
    """
    lock = (folder / ".lock").open("a+")
    in_use = f"run.dir: {folder} is in use by another run"
    way_out = "Wait for it, stop it, or choose another run.dir."
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{in_use}. {way_out}") from None
    except OSError:
        lock.seek(0)
        owner = lock.read()
        if owner and owner == identity(int(owner.split()[1])):
            raise ConfigError(f"{in_use}, process {owner.split()[1]} of this host. {way_out}") from None
    lock.seek(0)
    lock.truncate()
    lock.write(identity(os.getpid()))
    lock.flush()
    return lock


def identity(pid: int) -> str:
    """Names a process as no other: by its host, its number, and when it started. Without a start it has ended."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "ended"
    return f"{socket.gethostname()} {pid} {started}"
