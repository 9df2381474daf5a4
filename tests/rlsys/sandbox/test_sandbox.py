"""The sandbox, against programs that try to get out, at every level that this machine offers."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from processors import one_processor

from rlsys.sandbox import interpreter, runner, seccomp
from rlsys.sandbox.levels import SAFE_LEVELS, IsolationLevel
from rlsys.sandbox.outcome import SandboxError
from rlsys.sandbox.runner import run_program

LEVELS = [
    pytest.param(level, marks=pytest.mark.skipif(bool(why := runner.why_unavailable(level)), reason=f"{level}: {why}"))
    for level in IsolationLevel
]
SAFE_PARAMS = LEVELS[: len(SAFE_LEVELS)]
FILTERED = LEVELS[:-1]
SCRATCH = LEVELS[:2]
ROOT = Path(__file__).parents[3]


def survivors(caller: int) -> list[str]:
    """The processes started for `caller`: inside a sandbox all have the command line of its guard."""
    marks = b"\0%s\0" % runner.START.encode(), b"\0%d\0" % caller

    def line(entry: Path) -> bytes:
        try:
            return (entry / "cmdline").read_bytes()
        except OSError:
            return b""  # it has ended

    processes = [
        p.name for p in Path("/proc").glob("[0-9]*") if marks[0] in (command := line(p)) and command.endswith(marks[1])
    ]
    return [name for name in processes if name != str(caller)]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """No process, no zombie, no descriptor, no file in the temporary directory or in shared memory."""
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(place))
    shared, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    children = set(psutil.Process().children())  # a Ray of other tests may be among them
    yield
    assert not survivors(os.getpid())
    assert set(psutil.Process().children()) <= children
    assert not list(place.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("evil")]
    assert not [name for name in os.listdir("/tmp") if name.startswith("evil")]
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- what an honest program gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_reads_its_input_and_prints_its_output(level):
    ran = run_program("print(input()[::-1])\nprint('ä')", stdin="abc\n", level=level)
    assert (ran.ok, ran.reason, ran.exit_code, ran.stdout, ran.stderr) == (True, "", 0, "cba\nä\n", "")


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_is_a_main_module_with_the_standard_library(level):
    program = """
import asyncio, collections, ctypes, dataclasses, decimal, hashlib, heapq, json, random, re, sqlite3, threading, zlib
@dataclasses.dataclass
class Point:
    x: int
async def three():
    await asyncio.sleep(0.001)
    return 3
threads = [threading.Thread(target=lambda: found.append(1)) for _ in range(20)]
found = []
[t.start() for t in threads]
[t.join() for t in threads]
if __name__ == "__main__":
    print(Point(1), asyncio.run(three()), len(found), sum(range(10**6)), len(str(2 ** 20000)))
    exit()
"""
    ran = run_program(program, level=level, wall_s=20)
    assert ran.stdout == "Point(x=1) 3 20 499999500000 6021\n", ran.stderr
    assert ran.ok


@pytest.mark.parametrize("level", SCRATCH)
def test_a_program_has_a_scratch_folder_that_is_gone_afterwards(level):
    program = """
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/evil", "w").write("x" * 1000)
open("evil.txt", "w").write("abc")
os.mkdir("evil_folder")
print(os.getcwd(), open("/tmp/evil.txt").read(), sorted(os.listdir()))
"""
    assert run_program(program, level=level).stdout == "/tmp abc ['evil.txt', 'evil_folder']\n"
    assert run_program("import os; print(os.listdir())", level=level).stdout == "[]\n"


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_does_the_same_each_time(level):
    program = "print(hash('a'), list({'one', 'two', 'three', 'four'}))"
    assert run_program(program, level=level).stdout == run_program(program, level=level).stdout


@pytest.mark.parametrize(
    ("program", "reason", "exit_code"),
    [
        ("", "", 0),
        ("raise SystemExit", "", 0),
        ("import sys; sys.exit(3)", "exit", 3),
        ("import sys; sys.exit('no')", "exit", 1),
        ("1 / 0", "exit", 1),
        ("this is no Python", "exit", 1),
        ("print('\\ud800')", "exit", 1),
        ("\x00", "exit", 1),
        ("import os; os._exit(7)", "exit", 7),
        ("import os; os.kill(os.getpid(), 9)", "signal", None),
        ("import os; os.abort()", "signal", None),
        ("import ctypes; ctypes.string_at(0)", "signal", None),
        ("(" * 1000 + ")" * 1000, "exit", 1),
    ],
)
def test_the_result_says_how_a_program_ended(program, reason, exit_code):
    ran = run_program(program)
    assert (ran.ok, ran.reason, ran.exit_code) == (not reason, reason, exit_code)


def test_a_traceback_names_the_line_of_the_program():
    assert 'File "program.py", line 2' in run_program("\n1 / 0").stderr


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_standard_input_may_be_long_and_need_not_be_read(size):
    assert run_program("import sys; print(len(sys.stdin.read()))", stdin="x" * size).stdout == f"{size}\n"
    assert run_program("print(1)", stdin="x" * size).ok


def test_programs_that_run_together_are_isolated_from_each_other():
    with ThreadPoolExecutor(4) as pool:
        ran = list(
            pool.map(lambda i: run_program("open('mine', 'x').write('1'); print(input())", stdin=str(i)), range(12))
        )
    assert [r.stdout for r in ran] == [f"{i}\n" for i in range(12)]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[2], LEVELS[-1]])
def test_an_endless_loop_exceeds_the_cpu_time(level):
    ran = run_program("while True: pass", cpu_s=1, wall_s=10, level=level)
    assert (ran.ok, ran.reason) == (False, "timeout")


HANGS = {
    "asleep": "time.sleep(1000)",
    "at exit": "import atexit; atexit.register(time.sleep, 1000)",
    "in a thread": "import threading; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
    "closed": "os.close(0), os.close(1), os.close(2); time.sleep(1000)",
    "deaf": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
}


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]])
def test_a_program_that_prints_the_right_output_and_hangs_has_failed(level, hang):
    ran = run_program(f"import os, signal, time\nprint('expected', flush=True)\n{HANGS[hang]}", wall_s=0.3, level=level)
    assert (ran.ok, ran.reason, ran.stdout) == (False, "timeout", "expected\n")
    assert 0.2 < ran.seconds < 5


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_whose_time_is_over_before_it_begins_is_not_judged(level):
    outcomes = set()
    for _ in range(20):  # the kernel may let the program run before its supervisor sees that the time is over
        try:
            ran = run_program("print('expected')", wall_s=1e-6, level=level)
            outcomes.add((ran.ok, ran.reason))
        except SandboxError as error:
            outcomes.add(str(error).partition("were ")[2].partition(":")[0])
    assert "over before it began" in outcomes <= {"over before it began", (False, "timeout")}


@pytest.mark.parametrize(
    "level", [LEVELS[0], *(pytest.param(level, marks=pytest.mark.long) for level in (LEVELS[2], LEVELS[-1]))]
)
def test_programs_on_an_overloaded_processor_say_that_they_waited(level):
    program = "import time\nwhile time.process_time() < 1: pass\nprint('expected')"
    with one_processor(), ThreadPoolExecutor(20) as threads:
        results = list(threads.map(lambda _: run_program(program, wall_s=3, cpu_s=4, level=level), range(20)))
    late = [ran for ran in results if not ran.ok]
    assert late, "the processor was not overloaded"
    for ran in late:
        assert (ran.reason, ran.stdout) == ("timeout", "")
        assert ran.waited_seconds > ran.seconds / 2 > ran.cpu_seconds


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[2], LEVELS[-1]])
@pytest.mark.parametrize(
    "busy",
    [
        "import hashlib, threading\n"
        "threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha256', b'a', b'b', 10**9), daemon=True).start()\n",
        "import os\ntry:\n    if not os.fork():\n        while True: pass\n"
        "except OSError:\n    print('may not', flush=True)\n",
        "import os\ntry:\n    if not os.fork():\n        if os.fork(): os._exit(0)\n        while True: pass\n"
        "except OSError:\n    print('may not', flush=True)\n",
    ],
    ids=["thread", "process", "orphan"],
)
def test_what_a_program_has_started_uses_its_time(level, busy):
    ran = run_program(f"{busy}import time\ntime.sleep(60)", wall_s=2, cpu_s=4, level=level)
    assert ran.reason == "timeout"
    assert ran.cpu_seconds > 0.1 or "may not" in ran.stdout


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off(level, stream):
    ran = run_program(f"import sys\nwhile True: sys.{stream}.write('spam ' * 1000)", output_kb=64, level=level)
    assert (ran.ok, ran.reason) == (False, "output")
    assert len(getattr(ran, stream)) == 64 << 10


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "program",
    ["x = bytearray(10 << 30)", "x = []\nwhile True: x.append(' ' * 10**6)"],
)
def test_memory_is_limited(level, program):
    ran = run_program(program, memory_mb=256, level=level)
    assert (ran.ok, ran.reason) == (False, "memory")


@pytest.mark.parametrize("level", LEVELS)
def test_deep_recursion_ends_the_program_and_nothing_else(level):
    assert run_program("def f(): f()\nf()", level=level).reason == "exit"
    deep = "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())"
    ran = run_program(deep, memory_mb=256, level=level)
    assert ran.reason in ("memory", "signal")


@pytest.mark.parametrize("level", FILTERED)
def test_threads_are_limited(level):
    if level is IsolationLevel.USER_NAMESPACES and os.geteuid() == 0:
        pytest.skip("root's threads are limited by memory alone")
    program = """
import threading, time
count = 0
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count)
"""
    assert int(run_program(program, level=level, memory_mb=4096).stdout) < (100 if os.geteuid() == 0 else 1000)


@pytest.mark.parametrize("level", SCRATCH)
def test_the_scratch_folder_is_limited_in_size_and_in_files(level):
    fill = """
import errno
try:
    for i in range(10**6):
        with open(f"evil{i}", "w") as file:
            file.write(%r)
except OSError as error:
    print(errno.errorcode[error.errno], i)
"""
    name, count = run_program(fill % ("x" * (1 << 20)), level=level).stdout.split()
    assert (name, int(count) <= 16) == ("ENOSPC", True)
    name, count = run_program(fill % "", level=level).stdout.split()
    assert (name, int(count) <= 1200) == ("ENOSPC", True)
    ran = run_program("with open('evil', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", level=level)
    assert not ran.ok


@pytest.mark.parametrize("level", LEVELS)
def test_a_fork_bomb_ends_with_the_program(level):
    ran = run_program(
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", wall_s=0.3, cpu_s=1, level=level
    )
    assert not ran.ok


# --- attempts ---------------------------------------------------------------------------------------------------------

# Each must raise. {caller} is this process, {secret} a file of its user's.
ATTEMPTS = {
    "find an open descriptor": "[os.fstat(i) for i in range(3, 1024) if not closed(i)][0]",
    "read a file of the user's": "open({secret!r}).read()",
    "read a file by its descriptor": "os.read(os.open({secret!r}, os.O_RDONLY), 10)",
    "write to a file of the user's": "open({secret!r}, 'a').write('x')",
    "empty a file of the user's": "os.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
    "truncate a file of the user's": "os.truncate({secret!r}, 0)",
    "remove a file of the user's": "os.unlink({secret!r})",
    "rename a file of the user's": "os.rename({secret!r}, {secret!r} + '2')",
    "change the mode of a file of the user's": "os.chmod({secret!r}, 0o777)",
    "change the times of a file of the user's": "os.utime({secret!r})",
    "read through a link": "os.symlink({secret!r}, 'link1'); open('link1').read()",
    "read through a hard link": "os.link({secret!r}, 'link2'); open('link2').read()",
    "create a file beside the user's": "open({secret!r} + '.evil', 'w')",
    "list the home directory": "os.listdir({home!r})",
    "list the folder of the tests": "os.listdir({folder!r})",
    "read passwords": "open('/etc/passwd').read()",
    "read the environment of the caller": "open('/proc/{caller}/environ').read()",
    "read the memory of the caller": "open('/proc/{caller}/mem', 'rb').read()",
    "read its parent's environment": "open(f'/proc/{{os.getppid()}}/environ').read()",
    "read its own environment": "open('/proc/self/environ').read()",
    "write its own memory": "open('/proc/self/mem', 'r+b')",
    "see processes": "os.listdir('/proc')",
    "write to shared memory": "open('/dev/shm/evil', 'w').write('x')",
    "leave a file in the host's /tmp": "open('/var/tmp/evil', 'w').write('x')",
    "read the disk": "open('/dev/vda', 'rb').read(1)",
    "open a terminal": "open('/dev/tty', 'w')",
    "make a device": "os.mknod('evil', 0o60600, os.makedev(254, 0))",
    "make a named pipe": "os.mkfifo('evil')",
    "climb out of its root": "os.chroot('..'); os.stat({secret!r}).st_size / 0",
    "kill the caller": "os.kill({caller}, 9)",
    "stop the caller": "os.kill({caller}, 19)",
    "kill its parent": "os.kill(os.getppid(), 9)",
    "kill the group of the caller": "os.killpg({group}, 9)",
    "kill its own group's id 0": "os.kill(0, 9)",
    "kill all": "os.kill(-1, 9)",
    "kill a thread of its parent": "call(234, os.getppid(), os.getppid(), 9)",
    "queue a signal": "call(129, os.getppid(), 9, ctypes.create_string_buffer(128))",
    "hold a process": "os.pidfd_open(os.getppid())",
    "own signals of a file": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "limit its parent": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "slow down its parent": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "pin its parent": "os.sched_setaffinity(os.getppid(), [0])",
    "trace its parent": "call(101, 16, os.getppid(), 0, 0)",
    "trace itself": "call(101, 0, 0, 0, 0)",
    "read memory of its parent": "call(310, os.getppid(), None, 0, None, 0, 0)",
    "fork": "os.fork()",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {{}})",
    "execute": "os.execv('/proc/self/exe', ['python'])",
    "execute a descriptor": "call(322, os.memfd_create('evil'), b'', None, None, 0x1000)",
    "start a shell": "assert os.system('true') == 0",
    "start a subprocess": "subprocess.run(['true'], check=True)",
    "start a setuid program": "subprocess.run(['/bin/su', '-c', 'true'], check=True)",
    "start a daemon": "subprocess.Popen(['sleep', '31.4159'], start_new_session=True)",
    "fork by the C library": "assert ctypes.CDLL(None).fork() >= 0",
    "clone into namespaces": "call(56, 0x7E020000 | 17, 0, 0, 0, 0)",
    "clone anew": "call(435, ctypes.create_string_buffer(88), 88)",
    "open a socket": "socket.socket()",
    "open a datagram socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "open a Unix socket": "socket.socket(socket.AF_UNIX).connect('\\0evil')",
    "open a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "talk to the kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "resolve a name": "socket.getaddrinfo('example.com', 80)",
    "get a web page": "urllib.request.urlopen('http://127.0.0.1:8265', timeout=1)",
    "send to a Unix address": "call(44, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].fileno(), b'x', 1, 0, b'\\1\\0\\0evil', 7)",
    "pass a descriptor": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [1])",
    "mount": "call(165, b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
    "mount anew": "call(428, -100, b'/', 0)",
    "unmount": "call(166, b'/', 2)",
    "unshare": "call(272, 0x10000000)",
    "enter a namespace": "call(308, 0, 0)",
    "change its root": "os.chroot('/')",
    "become root": "os.setuid(0) or os.setgid(0)",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "add a key": "call(248, b'user', b'evil', b'x', 1, -3)",
    "join a keyring": "call(250, 1, b'evil')",
    "load a kernel program": "call(321, 0, None, 0)",
    "count events": "call(298, None, 0, -1, -1, 0)",
    "queue requests": "call(425, 8, ctypes.create_string_buffer(120))",
    "handle page faults": "call(323, 0)",
    "make memory files": "os.memfd_create('evil')",
    "share memory": "call(29, 1234, 4096, 0o1666)",
    "share memory by name": "multiprocessing.shared_memory.SharedMemory('evil', create=True, size=10)",
    "open a message queue": "call(240, b'evil', 0o102, 0o600, None)",
    "set the clock": "time.clock_settime(0, 0)",
    "set the host's name": "socket.sethostname('evil')",
    "reboot": "call(169, 0xfee1dead, 672274793, 0, None)",
    "push back input": "fcntl.ioctl(0, 0x5412, b'x')",
    "stop dying with its parent": "call(157, 1, 0, 0, 0, 0)",
    "become readable to others": "call(157, 4, 1, 0, 0, 0)",
    "open by handle": "call(304, 0, None, 0)",
    "lock memory": "call(151, 1)",
    "change its input": "os.write(0, b'x')",
}
PRELUDE = """
import ctypes, fcntl, multiprocessing.shared_memory, os, resource, socket, subprocess, sys, time, urllib.request
def call(*arguments):
    if ctypes.CDLL(None, use_errno=True).syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def closed(number):
    try:
        os.fstat(number)
    except OSError:
        return True
"""
# An error in these tests does not count as a refusal.
ATTEMPT = """
try:
    {code}
except (NameError, AttributeError, TypeError) as error:
    print("mistaken:", {what!r}, error)
except BaseException as error:
    print("refused")
else:
    print("done:", {what!r})
"""


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """A file that every user may read and write, so that only the sandbox protects it."""
    file = tmp_path_factory.mktemp("home") / "secret"
    file.write_text("the answer is 42")
    for folder in (file.parent, *file.parents[1:3]):
        folder.chmod(0o777)
    file.chmod(0o666)
    return file


@pytest.mark.parametrize("level", SAFE_PARAMS)
def test_no_attempt_to_get_out_succeeds(level, secret):
    facts = {
        "caller": os.getpid(),
        "group": os.getpgrp(),
        "secret": str(secret),
        "home": str(Path.home()),
        "folder": str(Path(__file__).parent),
    }
    attempts = {w: c for w, c in ATTEMPTS.items() if "call(" not in c or platform.machine() == "x86_64"}
    program = PRELUDE + "".join(
        ATTEMPT.format(code=code.format(**facts), what=attempt) for attempt, code in attempts.items()
    )
    ran = run_program(program, level=level, wall_s=20)
    assert [line for line in ran.stdout.splitlines() if line != "refused"] == []
    assert len(ran.stdout.splitlines()) == len(attempts), ran
    assert secret.read_text() == "the answer is 42"
    assert os.listdir(secret.parent) == ["secret"]


@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code")
def test_system_calls_under_other_numbers_are_refused_too(level):
    program = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(%r)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_long)(address)())
"""
    getpid_of_32_bits = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
    assert run_program(program % getpid_of_32_bits, level=level).reason == "signal"
    fork_of_x32 = b"\xb8\x39\x00\x00\x40\x0f\x05\xc3"  # mov eax, 0x40000039; syscall; ret
    assert run_program(program % fork_of_x32, level=level).stdout == "-1\n"


def test_a_program_cannot_write_its_own_verdict():
    forged = """
import os
for number in range(3, 300):
    try:
        os.write(number, b"start\\nend 0 0.0 0.0\\n")
    except OSError:
        pass
print("start\\nend 0 0.0 0.0")
os._exit(1)
"""
    assert run_program(forged).reason == "exit"


# --- ends -------------------------------------------------------------------------------------------------------------

CALLER = """
import sys; sys.path.insert(0, sys.argv[1])
from rlsys.sandbox.runner import run_program
run_program("import time; time.sleep(100)", wall_s=100, level=sys.argv[2])
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_a_program_dies_with_its_killed_caller(level, after_s):
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(ROOT), level], start_new_session=True)
    until = time.monotonic() + 10
    while not survivors(caller.pid) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after_s)
    assert survivors(caller.pid)
    os.kill(caller.pid, signal.SIGKILL) if after_s else os.killpg(caller.pid, signal.SIGKILL)
    caller.wait()
    until = time.monotonic() + 5
    while survivors(caller.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not survivors(caller.pid)


def test_with_limits_alone_no_process_outlives_the_program():
    daemon = """
import os, subprocess, time
started = 0
try:
    while True:
        subprocess.Popen(["sleep", "31.4159"], start_new_session=True)
        started += 1
except OSError:
    pass
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(31.4159)
    os._exit(0)
print(started)
"""
    ran = run_program(daemon.replace("while True", "for _ in range(5)"), level="limits")
    assert ran.stdout == "5\n", ran
    assert run_program(daemon, level="limits", wall_s=3).stdout in ("", "63\n")
    assert not [p for p in psutil.process_iter(["cmdline"]) if "31.4159" in (p.info["cmdline"] or [])]


# --- levels -----------------------------------------------------------------------------------------------------------


def test_the_strongest_available_level_is_chosen_and_described(monkeypatch):
    monkeypatch.setattr(runner, "why_unavailable", lambda level: "" if level is IsolationLevel.LANDLOCK else "not here")
    runner._strongest_level.cache_clear()
    try:
        assert runner.strongest_level() is IsolationLevel.LANDLOCK
        assert (
            runner.describe_level()
            == "A program runs isolated by Landlock file rules, a filter of system calls, limits."
        )
    finally:
        runner._strongest_level.cache_clear()


def test_without_a_safe_level_nothing_runs_and_the_error_shows_a_way(monkeypatch):
    monkeypatch.setattr(
        runner, "why_unavailable", lambda level: "" if level not in SAFE_LEVELS else "unshare: Operation not permitted"
    )
    runner._strongest_level.cache_clear()
    try:
        with pytest.raises(SandboxError, match="none is run") as error:
            run_program("print(1)")
        assert "user_namespaces: unshare: Operation not permitted. To have it, allow user namespaces" in str(
            error.value
        )
        assert "isolation: limits" in str(error.value)
        assert run_program("print(1)", level="limits").ok, "asked for by name"
    finally:
        runner._strongest_level.cache_clear()


def test_a_level_is_unavailable_if_a_program_gets_out(monkeypatch):
    monkeypatch.setattr(runner, "_build_filter", lambda scratch: b"")
    runner.why_unavailable.cache_clear()
    try:
        assert "it can start processes" in runner.why_unavailable(IsolationLevel.NAMESPACES)
    finally:
        runner.why_unavailable.cache_clear()


def test_a_broken_sandbox_is_not_the_programs_fault(monkeypatch):
    level = runner.strongest_level()
    monkeypatch.setattr(interpreter, "readable_files", lambda: ["/no/such/folder"])
    with pytest.raises(SandboxError, match="/no/such/folder"):
        run_program("print(1)", level=level)


OTHER_USER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from rlsys.sandbox import runner
for level in runner.SAFE_LEVELS[1:]:
    print(level, runner.why_unavailable(level) or runner.run_program("print(sum(range(10)))", level=level).stdout.strip())
    print(runner.run_program("import os\\nwhile True: os.fork()", level=level).reason)
print(runner.strongest_level())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_than_root_has_a_sandbox_too():
    python = "/usr/bin/python3"
    known = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    if known.stdout != "True\n":
        pytest.skip(f"no {python} of 3.11 or later that all may run")
    ran = subprocess.run(
        [python, "-c", OTHER_USER, str(ROOT)],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
    )
    if "None" in ran.stdout or "Permission" in ran.stderr:
        pytest.skip("the code is not readable to all")
    assert ran.stdout.splitlines() == ["user_namespaces 45", "exit", "landlock 45", "exit", "user_namespaces"], (
        ran.stderr
    )


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv to make it less")
def test_root_without_capabilities_is_isolated_by_what_is_left():
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from rlsys.sandbox import runner
print(runner.strongest_level(), runner.run_program("print(1)").stdout.strip(), runner.why_unavailable(runner.IsolationLevel.LIMITS))
"""
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program, str(ROOT)]
    ran = subprocess.run(bare, capture_output=True, text=True)
    assert ran.stdout.startswith("landlock 1 PermissionError: nothing keeps root"), ran


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_system_calls_have_the_numbers_of_the_kernels_headers(machine, monkeypatch):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header}")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+) +(\d+)", header.read_text())
    known = {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in lines}
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for table in (seccomp.HARMLESS, seccomp.OPENING, seccomp.CHANGING_FILES, seccomp.CHECKED):
        for name, number in seccomp.syscall_numbers(table).items():
            assert known[name] == number, name
