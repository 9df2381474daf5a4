"""The levels of isolation: what each one means, what the host needs for it, and how it is tried."""

from enum import StrEnum


class IsolationLevel(StrEnum):
    """How a program is isolated, strongest first."""

    NAMESPACES = "namespaces"
    USER_NAMESPACES = "user_namespaces"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    LIMITS = "limits"


SAFE_LEVELS = (IsolationLevel.NAMESPACES, IsolationLevel.USER_NAMESPACES, IsolationLevel.LANDLOCK)
LEVEL_DESCRIPTIONS = {
    IsolationLevel.NAMESPACES: "a user of its own, mount, process, network and IPC namespaces, a filter of system "
    "calls, limits",
    IsolationLevel.USER_NAMESPACES: "user, mount, process, network and IPC namespaces, a filter of system calls, "
    "limits",
    IsolationLevel.LANDLOCK: "Landlock file rules, a filter of system calls, limits",
    IsolationLevel.SECCOMP: "a filter of system calls and limits, but may read this user's files",
    IsolationLevel.LIMITS: "limits alone: it may use this user's files, processes and network",
}
HOW_TO_ENABLE = {
    IsolationLevel.NAMESPACES: "run as root with CAP_SYS_ADMIN (docker run --cap-add SYS_ADMIN --security-opt "
    "seccomp=unconfined)",
    IsolationLevel.USER_NAMESPACES: "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0; docker run --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined)",
    IsolationLevel.LANDLOCK: "use Linux 5.13 or newer with Landlock among the security modules (boot option "
    "lsm=landlock,…)",
}

# A safe level holds if this program prints only its last line: each attempt must fail, and the standard library must
# load.
PROBE = """
import ctypes, decimal, hashlib, json, os, random, socket
def attempt(what, action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return
    print(what)
attempt("it can read files of this host", open, {file!r})
attempt("it can list folders of this host", os.listdir, {folder!r})
attempt("it can write to files of this host", open, {file!r}, "a")
attempt("it has a network", socket.socket)
attempt("it can start processes", os.fork)
attempt("it can send signals", os.kill, os.getppid(), 0)
print("isolated")
"""
