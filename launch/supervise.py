"""Keeps a run going: the driver works in a child process, and a lost one is replaced by another that resumes the run.

The child reports whether it exited by itself, and its exit code says whether a restart could help: a run that failed
for a reason of its own would fail again. A child that could not report, because it was killed or lost its Ray, is
replaced. Signals to the parent are forwarded to the child; between two children they end the run. If the parent is
killed, the child is killed too.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from workers.start.worker_forkserver import exit_with_parent

EXIT_LOST = 75  # exit code of a driver that has lost what it needs: sysexits.h calls it a temporary failure
FORWARDED_SIGNALS = {  # and as what; a terminal that closes, or an ssh that ends, sends SIGHUP
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
LONGEST_WAIT_S = 60.0  # between two drivers, if those before got no further; a cluster that restarts takes minutes


@dataclass(frozen=True)
class ChildExit:
    """How a driver ended. `ChildExit(-9, exited_cleanly=False, forwarded_signal=0)`: it was killed."""

    status: int  # exit code, or minus the number of a signal
    exited_cleanly: bool  # it returned its exit code by itself
    forwarded_signal: int  # the first signal that was forwarded to it; 0: none

    @property
    def lost(self) -> bool:
        return not self.exited_cleanly or self.status == EXIT_LOST

    def __str__(self) -> str:
        if self.exited_cleanly:
            return "it lost a worker"
        if self.status < 0:
            return f"the driver was ended by {signal.Signals(-self.status).name}"
        return f"the driver ended without a word (exit code {self.status}), as when Ray is lost"


def run_with_restarts(
    run_driver: Callable[[str], int],
    max_restarts: int,
    note: Callable[[str], None],
    clean_up: Callable[[], object],
    saved_step: Callable[[], int] = lambda: 0,
) -> int:
    """Runs the driver in a child, again if it is lost, and returns the exit code.

    `run_driver(cause)` returns an exit code; `cause` says why the driver before it was lost, and is empty at first.
    `clean_up()` runs after a lost driver that no other follows. `saved_step()` is the step of the newest checkpoint: a
    driver that made one begins the count of restarts anew.
    """
    cause, restarts, step = "", 0, saved_step()
    with blocked_signals() as mask:
        while True:
            end = run_in_child(lambda cause=cause: run_driver(cause), mask)  # type: ignore[misc]
            received = end.forwarded_signal
            if not end.lost:
                return 0 if received == signal.SIGTERM and end.status == 128 + signal.SIGINT else end.status
            cause = str(end)
            if saved_step() > step:
                restarts, step = 0, saved_step()
            if received or restarts == max_restarts:
                break
            restarts += 1
            wait_s = min(2.0 ** (restarts - 2), LONGEST_WAIT_S) if restarts > 1 else 0.0
            wait = f", in {wait_s:.0f} s" if wait_s else ""
            note(f"{cause}; going on from the last checkpoint ({restarts} of run.max_restarts={max_restarts}){wait}")
            if received := wait_for_signal(wait_s):
                break
        run_in_child(lambda: int(bool(clean_up())), mask)
    if received:
        note(f"stopped: {cause}. The same command goes on from the last checkpoint.")
        return 0 if received == signal.SIGTERM else 128 + received
    note(f"{cause}. run.max_restarts is {max_restarts}: the same command goes on from the last checkpoint.")
    return 1


@contextlib.contextmanager
def blocked_signals() -> Iterator[set[signal.Signals | int]]:
    """Keeps signals pending until a child can take them. Yields the mask from before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def wait_for_signal(seconds: float) -> int:
    """The signal that comes within some seconds, as it would be forwarded, or 0."""
    wanted = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    received = signal.sigtimedwait(wanted, seconds)
    return FORWARDED_SIGNALS[signal.Signals(received.si_signo)] if received else 0


def run_in_child(work: Callable[[], int], signal_mask: set[signal.Signals | int]) -> ChildExit:
    """Forks, runs `work` in the child, and forwards signals until it has ended. They are blocked before and after."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, (read_end, write_end) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        work_and_exit(work, parent, write_end, signal_mask)
    os.close(write_end)
    with forwarded_signals(child) as received:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        _, status = os.waitpid(child, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    os.set_blocking(read_end, False)  # processes of the child may live on, and hold the pipe open
    try:
        exited_cleanly = bool(os.read(read_end, 1))
    except BlockingIOError:
        exited_cleanly = False
    os.close(read_end)
    return ChildExit(os.waitstatus_to_exitcode(status), exited_cleanly, received[0] if received else 0)


def work_and_exit(
    work: Callable[[], int], parent: int, write_end: int, signal_mask: set[signal.Signals | int]
) -> NoReturn:
    """The child's part: writes a byte to the pipe once `work` has returned."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        exit_with_parent(parent)  # a parent that is killed by SIGKILL cannot forward it
        os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the parent alone, which forwards it once
        code = work()
        os.write(write_end, b".")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader may be gone
                stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # a plain exit would wait for threads that wait for dead workers


@contextlib.contextmanager
def forwarded_signals(child: int) -> Iterator[list[int]]:
    """Forwards signals to the child, and lists them."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(FORWARDED_SIGNALS[signal.Signals(number)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, received[-1])

    handlers = {s: signal.signal(s, forward) for s in FORWARDED_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
