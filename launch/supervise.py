"""Keeps a run going: the driver works in a child process, and where it is lost, another one goes on from the last checkpoint.

The child says how it ended, and by its exit code whether another one would do better: a run that has failed of its own doing would
fail again. A child that did not get to say anything, killed by a signal or together with the Ray it was connected to, is replaced.
Signals to the parent go on to the child; if the parent is killed, so is the child.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from workers.supervision.worker_forkserver import exit_with_parent

EXIT_LOST = 75  # exit code of a driver that has lost what it needs: sysexits.h calls it a temporary failure
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class ChildExit:
    """Of a child. `End(-9, said=False, asked=0)`: it was killed"""

    status: int  # exit code, or minus the number of a signal
    exited_cleanly: bool  # whether it came to its end by itself
    forwarded_signal: int  # the first signal that was passed on to it

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
    drive: Callable[[str], int], max_restarts: int, tell: Callable[[str], None], tidy: Callable[[], object]
) -> int:
    """`drive(cause)` returns an exit code; `cause` says why it is called again, and is empty at first.

    `tidy()` is called after a driver that could not tidy up after itself, where none follows that would.
    """
    cause = ""
    for restart in range(max_restarts + 1):
        end = run_in_child(lambda cause=cause: drive(cause))  # type: ignore[misc]
        if not end.lost:
            return 0 if end.forwarded_signal == signal.SIGTERM and end.status == 128 + signal.SIGINT else end.status
        cause = str(end)
        if end.forwarded_signal or restart == max_restarts:
            break
        tell(f"{cause}; going on from the last checkpoint ({restart + 1} of run.max_restarts={max_restarts})")
    run_in_child(lambda: int(bool(tidy())))
    if end.forwarded_signal:
        tell(f"stopped: {cause}. The same command goes on from the last checkpoint.")
        return 0 if end.forwarded_signal == signal.SIGTERM else 128 + end.forwarded_signal
    tell(f"{cause}. run.max_restarts is {max_restarts}: the same command goes on from the last checkpoint.")
    return 1


def run_in_child(work: Callable[[], int]) -> ChildExit:
    sys.stdout.flush()
    sys.stderr.flush()
    parent, (word, mouth) = os.getpid(), os.pipe()
    before_all = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # until somebody is there to hear them
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before_all)
            exit_with_parent(parent)  # whoever kills it with a signal that it cannot pass on means the child too
            os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the parent alone, which passes it on once
            code = work()
            os.write(mouth, b".")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # whoever read them may be gone
                    stream.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # threads that wait for dead workers would hold a plain exit back
    os.close(mouth)
    asked = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {s: signal.signal(s, pass_on) for s in FORWARDED_SIGNALS}
    signal.pthread_sigmask(signal.SIG_SETMASK, before_all)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    os.set_blocking(word, False)  # what the child has started may live on, and hold the pipe open
    try:
        said = bool(os.read(word, 1))
    except BlockingIOError:
        said = False
    os.close(word)
    return ChildExit(os.waitstatus_to_exitcode(status), said, asked[0] if asked else 0)
