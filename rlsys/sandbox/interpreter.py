"""The Python interpreter inside the sandbox: how it is started, and which files of this host it needs."""

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
OPTIONS = ["-s", "-S", "-P", "-B", "-X", "utf8"]  # -I would ignore PYTHONHASHSEED
PREFIX = "/python"  # of the standard library inside namespaces: its real folder may lie in a user's home

# Prints the shared libraries that the standard library may load later, under the names by which the loader looks for
# them.
LIST_LIBRARIES = """
import ctypes, importlib, os, sys
class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
def loaded_libraries():
    names = []
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    def note(info, size, data):
        names.append(os.fsdecode(info.contents.name or b""))
        return 0
    ctypes.CDLL(None).dl_iterate_phdr(note, None)
    return names
loaded_at_start = loaded_libraries()
SKIPPED = ("_test", "_xx", "xx", "_tkinter", "_curses", "readline", "nis", "_gdbm", "_dbm", "ossaudiodev")
folders = [path for path in sys.path if path.endswith("lib-dynload")]
for name in sorted({entry.split(".")[0] for folder in folders for entry in os.listdir(folder)}):
    if not name.startswith(SKIPPED):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
print(*(name for name in loaded_libraries() if name not in loaded_at_start), sep="\\n")
"""


@cache
def readable_files() -> list[str]:
    """The files and folders of this host that a program may read: the standard library and its shared libraries."""
    listed = subprocess.run(
        [sys.executable, *OPTIONS, "-c", LIST_LIBRARIES], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    folders = list(dict.fromkeys(p for p in library_folders() if not p.endswith("lib-dynload")))
    names = [os.path.normpath(name) for name in listed.stdout.splitlines() if name.startswith("/")]
    libraries = [name for name in dict.fromkeys(names) if not name.startswith(tuple(folders))]
    others = ["/etc/ld.so.cache", "/dev/null"]
    return [*folders, *(name for name in [*libraries, *others] if os.path.exists(name))]


@cache
def library_folders() -> list[str]:
    """The folders of the standard library, in the order of `sys.path`."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    base = [p.replace(sys.prefix, sys.base_prefix, 1) if not os.path.isfile(p + "/os.py") else p for p in paths]
    standard = [p for p in dict.fromkeys([*base, os.path.dirname(os.__file__)]) if os.path.isdir(p)]
    return [*standard, *(p for p in (f"{s}/lib-dynload" for s in standard) if os.path.isdir(p))]


def path_inside(path: str) -> str:
    """Returns the path that a file of this host has inside namespaces."""
    for folder in library_folders():
        if path == folder or path.startswith(folder + "/"):
            return PREFIX + path.removeprefix(sys.base_prefix)
    return path


@cache
def is_open_to_all(path: str) -> bool:
    """True if every user can read a file and pass through the folders above it."""
    return bool(os.stat(path).st_mode & 0o004) and all(
        p.stat().st_mode & 0o001 for p in Path(os.path.realpath(path)).parents
    )
