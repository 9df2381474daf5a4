"""The system calls that a program in the sandbox may make, as a filter that the kernel runs.

A call that is not named here is refused, and so are calls that later kernels add. Refused are above all other processes
(`fork`, `execve`, signals, `ptrace`), the network (`socket`), mounts and namespaces, keys, and shared memory that
outlives its creator.
"""

import errno
import platform
import struct
from collections.abc import Sequence

OWN_PID = 0x7FFFFFFF  # placeholder in the filter for the process that installs it

# name, x86-64, arm64
HARMLESS = """
    read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; close 3 57; close_range 436 436; dup 32 23;
    dup2 33 -; dup3 292 24; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79; statx 332 291; lseek 8 62; access 21 -;
    faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49; fchdir 81 50;
    getdents64 217 61; fsync 74 82; fdatasync 75 83; ftruncate 77 46; fadvise64 221 223; statfs 137 43; fstatfs 138 44;
    sendfile 40 71; mmap 9 222; munmap 11 215; mprotect 10 226; mremap 25 216; madvise 28 233; brk 12 214;
    rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136;
    rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132; restart_syscall 219 128; pause 34 -; futex 202 98;
    set_robust_list 273 99; set_tid_address 218 96; rseq 334 293; exit 60 93; exit_group 231 94; arch_prctl 158 -; getpid 39 172;
    gettid 186 178; getppid 110 173; getpgrp 111 -; getpgid 121 155; getsid 124 156; getuid 102 174; geteuid 107 175;
    getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150; getgroups 115 158; umask 95 166; uname 63 160;
    sysinfo 99 179; times 100 153; getrusage 98 165; getrlimit 97 163; setrlimit 160 164; getrandom 318 278; getcpu 309 168;
    sched_yield 24 124; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
    sched_get_priority_max 146 125; sched_get_priority_min 147 126; wait4 61 260; waitid 247 95; clock_gettime 228 113;
    clock_getres 229 114; clock_nanosleep 230 115; nanosleep 35 101; gettimeofday 96 169; time 201 -; alarm 37 -;
    setitimer 38 103; getitimer 36 102; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; poll 7 -;
    ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
    epoll_pwait 281 22; eventfd2 290 19; pipe 22 -; pipe2 293 59; recvfrom 45 207; shutdown 48 210; getsockopt 55 209;
    getsockname 51 204; getpeername 52 205
"""
OPENING = "open 2 -; openat 257 56"
CHANGING_FILES = """
    mkdir 83 -; mkdirat 258 34; unlink 87 -; unlinkat 263 35; rmdir 84 -; rename 82 -; renameat 264 38; renameat2 316 276;
    symlink 88 -; symlinkat 266 36; link 86 -; linkat 265 37
"""
CHECKED = """
    clone 56 220; kill 62 129; tgkill 234 131; prlimit64 302 261; prctl 157 167; fcntl 72 25; ioctl 16 29;
    socketpair 53 199; sendto 44 206
"""
# From this number on, a call has the same number on every machine, and the filter reports it as missing. A C library
# then falls back to an older call: `clone` instead of `clone3`, whose flags a filter cannot see.
FIRST_COMMON = 424

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables, the kernel's name
ALL = 0xFFFFFFFF
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # access mode, O_CREAT, O_TRUNC, O_TMPFILE
THREAD, NAMESPACES = 0x00010000, 0x7E020000  # flags of `clone`

# Which half of which argument (2 × argument, + 1 for the high half), a mask, and the value it must have under the mask.
Condition = tuple[int, int, int]

# A call is allowed if every condition of one of its lists holds.
CONDITIONS: dict[str, Sequence[Sequence[Condition]]] = {
    "clone": [[(0, THREAD | NAMESPACES, THREAD)]],
    "kill": [[(0, ALL, OWN_PID)]],
    "tgkill": [[(0, ALL, OWN_PID)]],
    "prlimit64": [[(0, ALL, 0)], [(0, ALL, OWN_PID)]],
    "prctl": [[(0, ALL, 15)], [(0, ALL, 16)]],  # a thread's name
    # No owner, which would get signals; no locks and no larger pipes, which take the kernel's memory.
    "fcntl": [[(2, ALL, command)] for command in (0, 1, 2, 3, 4, 1030)],
    # Questions about a terminal, and flags.
    "ioctl": [[(2, ALL, request)] for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
    "socketpair": [[(0, ALL, 1)]],  # AF_UNIX: an event loop wakes itself with one
    "sendto": [[(8, ALL, 0), (9, ALL, 0)]],  # without an address: to the other end only
    "open": [[(2, WRITING, 0)]],
    "openat": [[(4, WRITING, 0)]],
}

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def syscall_numbers(table: str) -> dict[str, int]:
    """Returns the numbers that the calls of a table have on this machine, by name."""
    column = MACHINES[platform.machine()][0]
    rows = [entry.split() for entry in table.split(";")]
    return {name: int(machines[column]) for name, *machines in rows if machines[column] != "-"}


def is_supported() -> bool:
    return platform.machine() in MACHINES


def build_filter(scratch: bool) -> bytes:
    """Builds the filter. Without a scratch folder no file may be changed, even if its permissions allow it.

    The caller replaces `OWN_PID` in it.
    """
    opening = syscall_numbers(OPENING)
    free = syscall_numbers(HARMLESS) | (opening | syscall_numbers(CHANGING_FILES) if scratch else {})
    checked = syscall_numbers(CHECKED) | ({} if scratch else opening)
    code = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, MACHINES[platform.machine()][1]),
        (RETURN, 0, 0, KILL),  # calls of another architecture, such as 32-bit ones, have other numbers
        (LOAD, 0, 0, 0),
    ]
    for number in free.values():
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, number in checked.items():
        body = [line for conditions in CONDITIONS[name] for line in allow_if(conditions)]
        body.append((RETURN, 0, 0, REFUSE | errno.EPERM))
        code += [(EQUAL, 0, len(body), number), *body]
    code += [
        (AT_LEAST, 0, 1, 0x40000000),  # the x32 calls: the same ones under other numbers
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (AT_LEAST, 0, 1, FIRST_COMMON),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def allow_if(conditions: Sequence[Condition]) -> list[tuple[int, int, int, int]]:
    """Returns code that allows the call if all conditions hold, and otherwise jumps to its own end."""
    code = []
    for i, (half, mask, value) in enumerate(conditions):
        to_the_end = 3 * (len(conditions) - 1 - i) + 1
        code += [(LOAD, 0, 0, 16 + 4 * half), (AND, 0, 0, mask), (EQUAL, 0, to_the_end, value)]
    return [*code, (RETURN, 0, 0, ALLOW)]
