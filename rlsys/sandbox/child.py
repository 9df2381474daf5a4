"""The inside of the sandbox: a script that isolates itself and then runs a program in a process of its own.

    caller ──request──▶ guard ──▶ first process of the namespaces ──▶ program        with namespaces
           ──request──▶ guard ─────────────────────────────────────▶ program        without

           ◀──"start"── the program's process, once it is isolated and about to begin; it then closes this pipe
           ◀──"end <wait status> <seconds> <cpu seconds> <seconds waited for a processor>", or "late" with the same
              three times── the process above the program

Each process kills those below it before it ends, and dies with the one above it. So nothing is left behind if one of
them, or the caller, is killed. SIGTERM asks for a stop at once.

The script does not import the package, and imports little else, because it starts once per program. The caller sends it
compiled.
"""

# The public module `signal` takes half as long to load as all the rest.
import _signal as signal  # type: ignore[import-not-found]
import ctypes
import os
import resource
import struct
import sys
import time

# Constants of the kernel, under the names of its headers.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 8, 38, 36
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# Flags of a mount that a user namespace may not clear: as `statvfs` shows them → as `mount` wants them.
LOCKED_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
FIRST_UID = 3_000_000_000  # nobody's: each program gets a user of its own, so that limits per user are its own too
OWN_PID = struct.pack("=I", 0x7FFFFFFF)  # as in `seccomp`

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    from rlsys.sandbox.runner import SandboxRequest

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.syscall.restype = ctypes.c_long


def check_call(result: int, call: str) -> int:
    """Returns the result of a C call, or raises the error it set."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int = 0, value2: int = 0) -> None:
    check_call(libc.prctl(option, value, value2, 0, 0), f"prctl {option}")


def enter_sandbox(request: "SandboxRequest", stdin: int, report: int, channel: int, caller: int) -> None:
    """Returns in the program's process, isolated. The processes above it end inside this function."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGTERM})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(caller)
    try:  # noqa: SIM105  contextlib takes long to load
        write_file("/proc/self/oom_score_adj", "1000")  # where memory runs out, a program dies before its trainer
    except OSError:
        pass  # not every container allows it
    uid = os.geteuid() or FIRST_UID + os.getpid()
    report = os.dup2(report, max(4, stdin + 1, channel + 1, report))  # above the descriptors that the program gets
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # inside the namespaces there is none
    if request["namespaces"]:
        enter_namespaces(request, uid)
        fork_first_process()
    if request["kill_leftovers"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        supervise(pid, report, request["wall_s"], uid if request["kill_leftovers"] else None, proc)
    try:
        confine(request, uid, stdin, report, channel, supervisor)
    except BaseException as error:
        os.write(report, f"error {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def die_with_parent(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# --- above the program ------------------------------------------------------------------------------------------------


def fork_first_process() -> None:
    """Returns in the first process of the new namespaces; the process that calls it becomes the guard."""
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
        os._exit(1)  # the guard ended before the call above: inside the namespace, the parent's number does not tell
    except BlockingIOError:
        os.close(alive)
    os.setsid()  # or a signal to its own group would reach the caller's


def guard(first: int) -> None:
    """Waits for the first process of the namespaces, whose end ends all others in them."""
    if signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM:
        os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    os._exit(0)


def supervise(pid: int, report: int, wall_s: float, leftovers_uid: int | None, proc: int) -> None:
    """Waits for the program until its time is over, and reports how it ended."""
    start = time.monotonic()
    ended = None
    while not ended and (left := start + wall_s - time.monotonic()) > 0:
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if received and received.si_signo == signal.SIGTERM:
            break
    waited, used, seconds = waited_s(proc), 0.0, time.monotonic() - start
    if not ended:
        used = used_s(proc, "thread-self")
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if leftovers_uid is not None:
        kill_descendants(leftovers_uid)
    used = max(used, usage.ru_utime + usage.ru_stime)
    end = f"end {status}" if ended else "late"
    os.write(report, f"{end} {seconds:.3f} {used:.3f} {waited:.3f}\n".encode())
    os._exit(0)


def waited_s(proc: int) -> float:
    """How long the program's first thread was ready to run while others had the processors. 0 if the kernel hides it."""
    try:
        program = read_proc(proc, "thread-self/children").split()[0]  # numbered as outside, where `proc` is from
        return int(read_proc(proc, f"{program}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def used_s(proc: int, thread: str) -> float:
    """The processor time of all that a thread has started: those that keep others from running are no excuse."""
    seconds = 0.0
    try:
        for child in read_proc(proc, f"{thread}/children").split():
            ticks = read_proc(proc, f"{child}/stat").rpartition(")")[2].split()[11:15]  # its own, and of ended children
            seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            tasks = os.open(f"{child}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
            threads = os.listdir(tasks)
            os.close(tasks)
            seconds += sum(used_s(proc, f"{child}/task/{number}") for number in threads)
    except (OSError, ValueError):
        pass  # it has just ended
    return seconds


def read_proc(proc: int, path: str) -> str:
    fd = os.open(path, os.O_RDONLY, dir_fd=proc)
    with open(fd) as file:
        return file.read()


def kill_descendants(uid: int) -> None:
    """Kills what the program has left behind: orphans become children of this process."""
    if uid >= FIRST_UID and os.geteuid() == 0:
        if not (helper := os.fork()):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # all of this user's at once, so that none can outrun it
            os._exit(0)
        os.waitpid(helper, 0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in map(int, file.read().split()):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        except ProcessLookupError:
            pass


# --- namespaces and files ---------------------------------------------------------------------------------------------


def enter_namespaces(request: "SandboxRequest", uid: int) -> None:
    """Enters new namespaces, with a root that holds only the interpreter's files and a scratch folder."""
    user_namespace = request["user_namespace"]
    caller_uid, caller_gid = os.geteuid(), os.getegid()
    check_call(libc.unshare(NAMESPACES | (CLONE_NEWUSER if user_namespace else 0)), "unshare")
    if user_namespace:
        write_file("/proc/self/setgroups", "deny")
        write_file("/proc/self/uid_map", f"{caller_uid} {caller_uid} 1")
        write_file("/proc/self/gid_map", f"{caller_gid} {caller_gid} 1")
    libc.sethostname(b"sandbox", 7)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    root = "/proc"  # any folder that surely exists and holds none of the files below
    size = f"size={request['scratch_mb']}m,nr_inodes={request['inodes']},mode=555"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.umask(0o222)  # folders that nobody may write to, and no program can change that
    for target, source in request["files"].items():
        bind_read_only(source, root + target)
    os.umask(0o022)
    os.mkdir(root + "/tmp", 0o700)
    if not user_namespace:
        os.chown(root + "/tmp", uid, uid)
    os.chdir(root)
    check_call(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check_call(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")


def bind_read_only(source: str, target: str) -> None:
    """Makes a file or folder visible at `target`, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, target, "", MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag
    locked = sum(flag for shown, flag in LOCKED_FLAGS.items() if flags & shown)
    no_devices = 0 if source == "/dev/null" else MS_NODEV
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | no_devices | locked)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    check_call(result, f"mount {source} {target}")


def write_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)


# --- the program's own process ----------------------------------------------------------------------------------------


def confine(request: "SandboxRequest", uid: int, stdin: int, report: int, channel: int, supervisor: int) -> None:
    """Gives up everything that a program does not need. What is given up here cannot be had again."""
    os.setsid()
    close_descriptors(stdin, report, channel)
    set_limits(request["limits"])
    rules = landlock_rules(request["readable"]) if request["landlock"] else -1
    if not request["user_namespace"] and os.geteuid() == 0:
        become_user(uid, request["needs_read_capability"])
    else:
        keep_capabilities(0)
    if request["kill_leftovers"] and os.getuid() == 0:
        raise PermissionError("nothing keeps root from starting processes without end; run as another user")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if rules >= 0:
        check_call(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
        os.close(rules)
    prctl(PR_SET_DUMPABLE, 0)  # no core file, and no process of the same user can read its memory
    die_with_parent(supervisor)
    if not request["namespaces"]:
        os.chdir("/")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if request["filter"]:
        install_filter(request["filter"].replace(OWN_PID, struct.pack("=I", os.getpid())))
    os.write(report, b"start\n")
    os.close(report)


def close_descriptors(stdin: int, report: int, channel: int) -> None:
    """Keeps standard input, output, error, the channel as descriptor 3, and the report."""
    os.dup2(stdin, 0)
    if channel >= 0:
        os.dup2(channel, 3)
    os.closerange(4 if channel >= 0 else 3, report)
    os.closerange(report + 1, 65536)


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become_user(uid: int, needs_read_capability: bool) -> None:
    """Becomes another user than root. It keeps the capability to read files if only root can read the interpreter."""
    if needs_read_capability and not permitted_capabilities() & CAP_DAC_READ_SEARCH:
        return keep_capabilities(0)  # root without any capability: no other user could run Python here
    prctl(PR_SET_KEEPCAPS, int(needs_read_capability))
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        needs_read_capability = False  # a container's root that may not change its user
    keep_capabilities(CAP_DAC_READ_SEARCH if needs_read_capability else 0)


def permitted_capabilities() -> int:
    data = ctypes.create_string_buffer(24)
    check_call(libc.capget(struct.pack("=Ii", CAPABILITY_VERSION, 0), data), "capget")
    return int(struct.unpack("=6I", data)[1])


def keep_capabilities(mask: int) -> None:
    header, data = struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)
    check_call(libc.capset(header, data), "capset")


def landlock_rules(readable: list[str]) -> int:
    """Returns rules by which only these files can be read.

    Nothing can be written. Newer kernels also refuse connections, and signals to other processes.
    """
    version = check_call(libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1), "landlock")
    file_rights = (1 << 13 if version == 1 else 1 << 14 if version == 2 else 1 << 15 if version < 5 else 1 << 16) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", file_rights, network, scopes)[:size]
    rules = check_call(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")
    for path in readable:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = LANDLOCK_READ_FILE | LANDLOCK_READ_DIR if os.path.isdir(path) else LANDLOCK_READ_FILE
        rule = struct.pack("=Qi", access, fd)
        check_call(libc.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    return rules


def install_filter(code: bytes) -> None:
    """Installs the filter of system calls, which cannot be removed."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(pointer))


def run_as_main(source: "str | CodeType", sys_path: list[str]) -> None:
    """Runs the program as `__main__`, as if it had been started by itself."""
    import builtins

    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.path[:], sys.argv[:] = sys_path, ["program.py"]
    sys.path_importer_cache.clear()
    sys.set_int_max_str_digits(0)
    main = type(sys)("__main__")
    vars(main).update(__builtins__=builtins, __file__="program.py")
    sys.modules["__main__"] = main
    exec(compile(source, "program.py", "exec") if isinstance(source, str) else source, vars(main))


def main(request: "SandboxRequest", stdin: int, report: int, channel: int, caller: int) -> None:
    enter_sandbox(request, stdin, report, channel, caller)
    run_as_main(request["program"], request["sys_path"])
