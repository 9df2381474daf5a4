"""Ends processes of a private Ray, and removes what killed drivers have left behind.

A private Ray's folder is named rlsys-PID-…; its driver holds a lock on a file in it as long as it lives.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

import psutil

SYSTEM_TEMP_DIR = tempfile.gettempdir()  # before a private Ray sets its own


def short_temp_dir() -> str:
    """The system's temporary directory, or /tmp if its path is too long for Ray's sockets.

    The sockets lie deep in Ray's folder, and the path of a socket has at most 107 characters.
    """
    pid = os.getpid()
    deepest = f"/rlsys-{pid}-12345678/r/session_2026-01-01_00-00-00_000000_{pid}/sockets/dash_MetricsHead"
    return SYSTEM_TEMP_DIR if len(SYSTEM_TEMP_DIR) + len(deepest) <= 107 else "/tmp"


def remove_leftovers() -> None:
    """Removes folders of private Rays whose driver was killed, and ends the processes that still run in them."""
    for folder in abandoned_folders():
        end_processes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def abandoned_folders() -> list[Path]:
    """Folders of private Rays whose driver has ended, on this host or in another container or host."""
    pids = ((folder, folder.name.split("-")[1]) for folder in Path(short_temp_dir()).glob("rlsys-*-*"))
    return [folder for folder, pid in pids if pid.isdigit() and not is_running(int(pid)) and not is_locked(folder)]


def lock_folder(folder: Path) -> IO[str]:
    """Locks the folder until the file is closed. Other containers and hosts that see the folder see the lock too."""
    lock = (folder / "lock").open("w")
    with contextlib.suppress(OSError):  # a file system without locks: then only the process id counts
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_locked(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # locked, or another user's
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def is_running(pid: int) -> bool:
    """False for a zombie too: in a container nobody may ever reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_processes_in(folder: Path) -> None:
    """Ends all processes whose temporary directory lies in `folder`."""
    end_processes([process for process in psutil.process_iter() if has_temp_dir_in(process, folder)], patience_s=0)


def has_temp_dir_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(str(folder))
    except psutil.Error:  # it has ended, or is another user's
        return False


def end_processes(processes: list[psutil.Process], patience_s: float = 1) -> None:
    """Waits for the processes to end, and kills those that do not."""
    for process in wait_for_exit(processes, patience_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for_exit(processes, 5)


def wait_for_exit(processes: list[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Returns the processes that still run after that time."""
    deadline = time.monotonic() + patience_s
    while (alive := [p for p in processes if is_running(p.pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive
