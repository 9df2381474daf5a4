"""Runs Python programs that a model has written, and lets nothing out but what they print.

    run_program("print(input()[::-1])", stdin="abc")      # ProgramResult(ok=True, exit_code=0, stdout="cba\\n", …)

How strongly a program is isolated depends on the host. `strongest_level()` tries the levels in this order, each with a
real program, and takes the first that holds:

    namespaces        as root: own mount, process, network, IPC and host-name namespaces, own user; system-call filter
    user_namespaces   the same for any user, inside a user namespace
    landlock          the kernel's file rules (Linux 5.13) and the filter of system calls
    seccomp           the filter of system calls alone: files that the user may read can be read. Only on request
    limits            resource limits alone: files, network, processes of the same user. Only on request

Covered, above `limits`:
  - Processes: none can be started, so none survives. Threads can, at most 64 (not limited for root that may not change
    its user).
    Killing the caller, with or without its group, kills the program. No signals, ptrace or limits for other processes.
  - Files: the standard library, read-only. With namespaces also `/tmp`, empty at the start and removed at the end, with
    `scratch_mb` and
    1,000 files; without namespaces nothing can be written. No `/proc`, no home, no packages outside the standard
    library's folder.
  - Network: no sockets, not even Unix or abstract ones. Environment: PATH, LANG, HOME and PYTHONHASHSEED.
  - Processor time, wall-clock time, address space, file size, open files, core files, output.
  - The kernel: about 130 of the 360 system calls; no io_uring, bpf, keys, System V or POSIX shared memory, namespaces,
    mounts.

Not covered:
  - Errors of the kernel in those 130 calls, and side channels of the hardware (caches, timing). It is not a virtual
    machine.
  - With `landlock` and below: whether a file exists, its size and times (`stat`); the host's name and its processes'
    numbers.
  - Processor time is limited, not shared fairly: programs that run together slow each other down. A
    result says how long the program waited for a processor.
  - Where the kernel calls a process root and it cannot be another user, threads are limited by memory alone.
  - With `limits`, memory is limited per process, and processes that the program has started outlive a killed caller.

Hashes of strings are not randomized, so a program does the same each time unless it asks for the time or for
randomness.
"""

import fcntl
import marshal
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any, BinaryIO, TypedDict

from rlsys.sandbox import interpreter, seccomp
from rlsys.sandbox.levels import HOW_TO_ENABLE, LEVEL_DESCRIPTIONS, PROBE, SAFE_LEVELS, IsolationLevel
from rlsys.sandbox.outcome import ProgramResult, SandboxError, interpret, last_line, read_output

CHILD = Path(__file__).with_name("child.py")
START = (
    "import marshal, sys; fd, *rest = map(int, sys.argv[1:]); code, request = marshal.load(open(fd, 'rb')); "
    "exec(code); main(request, *rest)"
)
INODES = 1000
THREADS = 64
OPEN_FILES = 64
STACK_BYTES = 64 << 20
START_S = 20.0  # a start takes hundredths of a second, and this long only on an overloaded machine


def run_program(
    program: str | CodeType,
    *,
    stdin: str = "",
    wall_s: float = 6.0,
    cpu_s: float = 4.0,  # rounded up to whole seconds
    memory_mb: int = 512,  # address space; the interpreter itself takes about 30
    output_kb: int = 64,  # of stdout, and of stderr; a program that prints more is killed
    scratch_mb: int = 16,
    channel: int | None = None,  # a socket that the program takes over, as its file descriptor 3
    on_start: Callable[["subprocess.Popen[bytes]"], None] | None = None,  # gets the guard: SIGTERM ends the program
    level: IsolationLevel | str | None = None,  # None: the strongest there is, or a SandboxError
) -> ProgramResult:
    """Runs a program to its end, or to its limit. May be called from many threads at once."""
    try:
        level = strongest_level() if level is None else IsolationLevel(level)
        request = _make_request(level, program, cpu_s, wall_s, memory_mb, scratch_mb)
        child, report = _start_child(request, stdin, channel)
    finally:
        if channel is not None:
            os.close(channel)  # so that its other end sees when the program is gone
    if on_start:
        on_start(child)
    assert child.stdout is not None
    assert child.stderr is not None
    with child, child.stdout, child.stderr, report:
        output = read_output(child, report.fileno(), wall_s + START_S, output_kb << 10)
    return interpret(output, math.ceil(cpu_s), level)


# --- the start of a program -------------------------------------------------------------------------------------------


class SandboxRequest(TypedDict):
    """What the child gets, as `marshal` can carry it."""

    program: str | CodeType
    sys_path: list[str]
    wall_s: float
    namespaces: bool
    user_namespace: bool  # besides the others
    files: dict[str, str]  # of the new root: path inside → path on this host
    scratch_mb: int
    inodes: int
    landlock: bool
    readable: list[str]  # with landlock
    filter: bytes  # of system calls; empty: none
    limits: dict[str, int]
    needs_read_capability: bool  # whether only root can read the interpreter
    kill_leftovers: bool  # whether the program can start processes


def _make_request(
    level: IsolationLevel, program: str | CodeType, cpu_s: float, wall_s: float, memory_mb: int, scratch_mb: int
) -> SandboxRequest:
    namespaces = level in (IsolationLevel.NAMESPACES, IsolationLevel.USER_NAMESPACES)
    files = interpreter.readable_files()
    paths = interpreter.library_folders()
    own_user = os.geteuid() == 0 and level is not IsolationLevel.USER_NAMESPACES
    limits = {
        "RLIMIT_CPU": math.ceil(cpu_s),
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": scratch_mb << 20 if namespaces else 0,
        "RLIMIT_NPROC": THREADS if namespaces or own_user else THREADS + _count_threads(os.getuid()),
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_STACK": STACK_BYTES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 64,
    }
    return {
        "program": program,
        "sys_path": [interpreter.path_inside(p) if namespaces else p for p in paths],
        "wall_s": wall_s,
        "namespaces": namespaces,
        "user_namespace": level is IsolationLevel.USER_NAMESPACES,
        "files": {interpreter.path_inside(path): path for path in files},
        "scratch_mb": scratch_mb,
        "inodes": INODES + 8 * len(files),
        "landlock": level is IsolationLevel.LANDLOCK,
        "readable": files,
        "filter": b"" if level is IsolationLevel.LIMITS else _build_filter(namespaces),
        "limits": limits,
        "needs_read_capability": not namespaces and not all(map(interpreter.is_open_to_all, files)),
        "kill_leftovers": level is IsolationLevel.LIMITS,
    }


@cache
def _build_filter(scratch: bool) -> bytes:
    return seccomp.build_filter(scratch)


def _count_threads(uid: int) -> int:
    """Counts a user's threads: a limit on them counts those outside the sandbox too."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(entry.path + "/task"))
        except OSError:
            continue  # it has ended
    return count


def _start_child(
    request: SandboxRequest, stdin: str, channel: int | None
) -> "tuple[subprocess.Popen[bytes], BinaryIO]":
    """Starts the guard; returns it and the pipe by which it reports."""
    message: Any = _compile_child(), request
    with _sealed_file(marshal.dumps(message)) as message_fd, _sealed_file(stdin.encode(errors="replace")) as stdin_fd:
        report, report_end = os.pipe()
        fds = [message_fd, stdin_fd, report_end, -1 if channel is None else channel]
        try:
            child = subprocess.Popen(
                [sys.executable, *interpreter.OPTIONS, "-c", START, *map(str, [*fds, os.getpid()])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd for fd in fds if fd >= 0],
                env=interpreter.ENVIRONMENT,
                cwd="/",
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(report_end)
    return child, open(report, "rb")


@cache
def _compile_child() -> CodeType:
    """Compiles the child's script once, instead of at every start."""
    return compile(CHILD.read_bytes(), CHILD.name, "exec")


@contextmanager
def _sealed_file(content: bytes) -> Iterator[int]:
    """A file in memory that has no name and cannot be changed."""
    fd = os.memfd_create("rlsys", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


# --- what the host offers ---------------------------------------------------------------------------------------------

_lock = Lock()


def strongest_level() -> IsolationLevel:
    """Finds by trying the strongest level that holds on this host. Raises `SandboxError` if none is safe."""
    with _lock:
        return _strongest_level()


@cache
def _strongest_level() -> IsolationLevel:
    problems = []
    for level in SAFE_LEVELS:
        problem = why_unavailable(level)
        if not problem:
            return level
        problems.append(f"  {level}: {problem}. To have it, {HOW_TO_ENABLE[level]}.")
    raise SandboxError(
        "Programs written by a model cannot be isolated here, so none is run:\n"
        + "\n".join(problems)
        + "\nOr accept less by name: `isolation: seccomp` lets them read this user's files, `isolation: limits` lets "
        "them do all that this user may."
    )


@cache
def why_unavailable(level: IsolationLevel) -> str:
    """Says why a level does not hold on this host; empty if it does."""
    if sys.platform != "linux":
        return "this is not Linux"
    if level is IsolationLevel.NAMESPACES and os.geteuid() != 0:
        return "this is not root"
    if level is not IsolationLevel.LIMITS and not seccomp.is_supported():
        return "the filter of system calls is written for x86-64 and arm64 alone"
    file = Path(__file__).resolve()
    program = PROBE.format(file=str(file), folder=str(file.parent)) if level in SAFE_LEVELS else "print('isolated')"
    try:
        result = run_program(program, level=level, wall_s=60, cpu_s=30)
    except (SandboxError, OSError) as error:
        return str(error).removeprefix(f"level {level}: ")
    if result.ok and result.stdout == "isolated\n":
        return ""
    return ", ".join(result.stdout.splitlines()) or last_line(result.stderr) or result.reason


def describe_level(level: IsolationLevel | str | None = None) -> str:
    """Describes the isolation in one sentence, for the start of a run."""
    level = strongest_level() if level is None else IsolationLevel(level)
    return f"A program runs isolated by {LEVEL_DESCRIPTIONS[level]}."
