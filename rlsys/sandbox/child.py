"""The inside of the sandbox: a script that isolates itself, and then runs a program in a process of its own.

    caller ──request──▶ guard ──▶ first process of the namespaces ──▶ program        with namespaces
           ──request──▶ guard ─────────────────────────────────────▶ program        without

           ◀──"start"── program, when it is isolated and about to begin; it holds this pipe no longer then
           ◀──"end <wait status> <cpu seconds> <seconds>", or "late"── the process above it

Whoever stands above kills what is below when it ends itself, so that killing any of them, or the caller, leaves nothing. SIGTERM
says to stop at once. It runs without the package and imports little, because it starts once for every program; the caller sends it
compiled.
"""

import _signal as signal  # type: ignore[import-not-found]  # the public one would take half as long as all the rest
import ctypes
import os
import resource
import struct
import sys
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 8, 38, 36
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
LOCKED = {
    1: 1,
    2: 2,
    4: 4,
    8: 8,
    1024: 1024,
    2048: 2048,
    4096: 1 << 21,
}  # flag that statvfs shows → the one mount wants
CAPABILITIES, READ_SEARCH = 0x20080522, 1 << 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FIRST_UID = 3_000_000_000  # nobody's: each program gets one of its own, so that limits per user are its own too
OWN_PID = struct.pack("=I", 0x7FFFFFFF)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    from rlsys.sandbox.runner import SandboxRequest

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.syscall.restype = ctypes.c_long


def done(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int = 0, more: int = 0) -> None:
    done(libc.prctl(option, value, more, 0, 0), f"prctl {option}")


def enter(request: "SandboxRequest", stdin: int, report: int, channel: int, caller: int) -> None:
    """Returns in the program's process, isolated; the processes above it end here."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGTERM})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(caller)
    try:  # noqa: SIM105  contextlib takes long to load
        write("/proc/self/oom_score_adj", "1000")  # where memory runs out, a program goes before its trainer
    except OSError:
        pass  # not all containers let it
    uid = os.geteuid() or FIRST_UID + os.getpid()
    if request["namespaces"]:
        isolate(request, uid)
        alive, hold = os.pipe()
        first = os.fork()
        if first:
            os.close(alive)
            guard(first)
        os.close(hold)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_blocking(alive, False)
        try:
            os.read(alive, 1)
            os._exit(1)  # the guard ended before the line above
        except BlockingIOError:
            os.close(alive)
        os.setsid()  # or a signal to its own group would reach the caller's
    if request["reap"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    report = os.dup2(report, max(4, stdin + 1, channel + 1, report))  # out of the way of the program's own
    above = os.getpid()
    pid = os.fork()
    if pid:
        supervise(pid, report, request["wall_s"], uid if request["reap"] else None)
    try:
        confine(request, uid, stdin, report, channel, above)
    except BaseException as error:
        os.write(report, f"error {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def die_with(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# --- above the program ------------------------------------------------------------------------------------------------------


def guard(first: int) -> None:
    """Waits for the first process of the namespaces, whose end ends all others in them."""
    if signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM:
        os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    os._exit(0)


def supervise(pid: int, report: int, wall_s: float, reap: int | None) -> None:
    """Waits for the program until its time is over, and reports."""
    begin = time.monotonic()
    ended = None
    while not ended and (left := begin + wall_s - time.monotonic()) > 0:
        came = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if came and came.si_signo == signal.SIGTERM:
            break
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if reap is not None:
        kill_descendants(reap)
    seconds = time.monotonic() - begin
    said = f"end {status} {usage.ru_utime + usage.ru_stime:.3f} {seconds:.3f}\n" if ended else f"late {seconds:.3f}\n"
    os.write(report, said.encode())
    os._exit(0)


def kill_descendants(uid: int) -> None:
    """Kills what the program has left behind: orphans come to this process."""
    if uid >= FIRST_UID and os.geteuid() == 0:
        if not (helper := os.fork()):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all of this user's at once, so that none can outrun it
            os._exit(0)
        os.waitpid(helper, 0)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in map(int, file.read().split()):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        except ProcessLookupError:
            pass


# --- namespaces and files ----------------------------------------------------------------------------------------------------


def isolate(request: "SandboxRequest", uid: int) -> None:
    """New namespaces, and a root of nothing but the interpreter's files and a scratch folder."""
    user = request["user_namespace"]
    mine, group = os.geteuid(), os.getegid()
    done(libc.unshare(NAMESPACES | (CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{mine} {mine} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    libc.sethostname(b"sandbox", 7)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    root = "/proc"  # any folder that surely exists and holds none of the files that are wanted
    mount(
        "tmpfs",
        root,
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={request['scratch_mb']}m,nr_inodes={request['inodes']},mode=555",
    )
    os.umask(0o222)  # folders that nobody may write to, and no program can change that
    for target, source in request["files"].items():
        show(source, root + target)
    os.umask(0o022)
    os.mkdir(root + "/tmp", 0o700)
    if not user:
        os.chown(root + "/tmp", uid, uid)
    os.chdir(root)
    done(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    done(libc.umount2(b".", 2), "umount")  # MNT_DETACH
    os.chdir("/tmp")


def show(source: str, target: str) -> None:
    """Makes a file or folder visible at `target`, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, target, "", MS_BIND | MS_REC)
    there = os.statvfs(target).f_flag
    keep = sum(flag for shown, flag in LOCKED.items() if there & shown)
    device = 0 if source == "/dev/null" else MS_NODEV
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | device | keep)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done(
        libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {source} {target}"
    )


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)


# --- the program's own process -----------------------------------------------------------------------------------------------


def confine(request: "SandboxRequest", uid: int, stdin: int, report: int, channel: int, above: int) -> None:
    """Gives up everything that a program has no need of. What is given up here cannot be had again."""
    os.setsid()
    os.dup2(stdin, 0)
    if channel >= 0:
        os.dup2(channel, 3)
    first_free = 4 if channel >= 0 else 3
    os.closerange(first_free, report)
    os.closerange(report + 1, 65536)
    for name, value in request["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    rules = landlock(request["readable"]) if request["landlock"] else -1
    if not request["user_namespace"] and os.geteuid() == 0:
        become(uid, request["reader"])
    else:
        keep_capabilities(0)
    if request["reap"] and os.getuid() == 0:
        raise PermissionError("nothing keeps root from starting processes without end; run as another user")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if rules >= 0:
        done(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
        os.close(rules)
    prctl(PR_SET_DUMPABLE, 0)  # no core file, and nobody of the same user looks in
    die_with(above)
    if not request["namespaces"]:
        os.chdir("/")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if request["filter"]:
        install(request["filter"].replace(OWN_PID, struct.pack("=I", os.getpid())))
    os.write(report, b"start\n")
    os.close(report)


def become(uid: int, reader: bool) -> None:
    """Another user than root. As `reader` it may still reach an interpreter in root's home, as far as it is let."""
    if reader and not permitted() & READ_SEARCH:
        return keep_capabilities(0)  # root without any capability: nobody else could run Python here
    prctl(PR_SET_KEEPCAPS, int(reader))
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        reader = False  # a container's root that may not
    keep_capabilities(READ_SEARCH if reader else 0)


def permitted() -> int:
    data = ctypes.create_string_buffer(24)
    done(libc.capget(struct.pack("=Ii", CAPABILITIES, 0), data), "capget")
    return int(struct.unpack("=6I", data)[1])


def keep_capabilities(which: int) -> None:
    header, data = struct.pack("=Ii", CAPABILITIES, 0), struct.pack("=6I", which, which, 0, 0, 0, 0)
    done(libc.capset(header, data), "capset")


def landlock(readable: list[str]) -> int:
    """Rules by which only these files can be read and nothing written; also no connections, no signals to others."""
    version = done(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "landlock")
    files = (1 << 13 if version == 1 else 1 << 14 if version == 2 else 1 << 15 if version < 5 else 1 << 16) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", files, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = done(libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    for path in readable:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        done(libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, fd), 0), f"landlock_add_rule {path}")
        os.close(fd)
    return rules


def install(code: bytes) -> None:
    """The filter of system calls."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(pointer))


def begin(source: "str | CodeType", path: list[str]) -> None:
    """Runs the program as `__main__`, as if it had been started by itself."""
    import builtins

    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.path[:], sys.argv[:] = path, ["program.py"]
    sys.path_importer_cache.clear()
    sys.set_int_max_str_digits(0)
    main = type(sys)("__main__")
    vars(main).update(__builtins__=builtins, __file__="program.py")
    sys.modules["__main__"] = main
    exec(compile(source, "program.py", "exec") if isinstance(source, str) else source, vars(main))


def main(request: "SandboxRequest", stdin: int, report: int, channel: int, caller: int) -> None:
    enter(request, stdin, report, channel, caller)
    begin(request["program"], request["path"])
