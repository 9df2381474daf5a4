"""What a program in the sandbox has printed, and how it ended."""

import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass

from rlsys.sandbox.levels import IsolationLevel


class SandboxError(RuntimeError):
    """The sandbox could not do its work. Never the program's fault."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    `ProgramResult(ok=False, reason="exit", exit_code=1, stdout="", stderr="…ZeroDivisionError: …\\n", seconds=0.01)`
    """

    ok: bool  # it ended by itself, with exit code 0
    reason: str  # "" | "exit" | "signal" | "timeout" | "memory" | "output"
    exit_code: int | None  # None if it was killed
    stdout: str
    stderr: str
    seconds: float  # from its first line to its end
    cpu_seconds: float = 0.0  # of all its processes
    waited_seconds: float = 0.0  # its first thread was ready to run, and had no processor


@dataclass(frozen=True)
class ProgramOutput:
    """What the guard and the program have written."""

    report: list[str]  # lines of the child's report
    stdout: str
    stderr: str
    flooded: bool  # whether one of them exceeded the limit
    seconds: float


def read_output(child: "subprocess.Popen[bytes]", report: int, timeout_s: float, max_bytes: int) -> ProgramOutput:
    """Reads until the report, stdout and stderr are closed. Stops a program that writes too much."""
    assert child.stdout is not None
    assert child.stderr is not None
    buffers = {fd: bytearray() for fd in (report, child.stdout.fileno(), child.stderr.fileno())}
    start = time.monotonic()
    flooded = False
    try:
        with selectors.DefaultSelector() as selector:
            for fd in buffers:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map() and (left := start + timeout_s - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 16)
                    room = max_bytes - len(buffers[key.fd])
                    buffers[key.fd] += data[:room]
                    if not data:
                        selector.unregister(key.fd)
                    elif len(data) > room and not flooded:
                        flooded = True
                        child.send_signal(signal.SIGTERM)
    finally:
        if child.poll() is None:  # the time is over, or an exception came: killing the guard kills all below it
            child.kill()
        child.wait()
    lines, stdout, stderr = (data.decode(errors="replace") for data in buffers.values())
    return ProgramOutput(lines.splitlines(), stdout, stderr, flooded, time.monotonic() - start)


def interpret(output: ProgramOutput, cpu_s: int, level: IsolationLevel) -> ProgramResult:
    """Decides from the child's report how the program ended. Raises `SandboxError` if it never began."""

    def failed(reason: str, *times: float) -> ProgramResult:
        return ProgramResult(False, reason, None, output.stdout, output.stderr, *(times or [output.seconds]))

    lines = [line.split(" ") for line in output.report]
    if lines[:1] == [["start"]] and output.flooded:
        return failed("output")
    match lines:
        case [["start"], ["late", *numbers]]:
            return failed("timeout", *map(float, numbers))
        case [["late", seconds, *_]]:
            raise SandboxError(
                f"the {seconds} s of a program were over before it began: this machine is overloaded, or the time too short."
            )
        case [["start"], ["end", status, *numbers]]:
            times = [float(number) for number in numbers]
            code = os.waitstatus_to_exitcode(int(status))
            if code < 0:
                # On a busy machine the kernel's limit, which counts ticks, strikes before that many seconds were really
                # used.
                used_up = code == -signal.SIGKILL and times[1] > cpu_s / 2
                return failed("timeout" if used_up else "signal", *times)
            memory = last_line(output.stderr).startswith("MemoryError")
            reason = "" if not code else "memory" if memory else "exit"
            return ProgramResult(code == 0, reason, code, output.stdout, output.stderr, *times)
        case [["start"]]:  # the supervisor was killed: at the weakest level a program can do that
            return failed("signal")
    problem = output.report[0].removeprefix("error ") if output.report else last_line(output.stderr)
    raise SandboxError(f"level {level}: {problem or 'it ended without a report'}")


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
