"""The reward `code`: runs the program in a completion against tests.

The tests are the row's field `tests`, or else its answer: the field that `data.answer_key` names. They may be:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                      standard input, and what the program must print
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}          arguments of a function, and what it must return
    [{"input": "1 2\\n", "output": "3\\n"}]                          the first form, one by one
    ["assert add(1, 2) == 3"]                                       Python, each text a test
    "def check(candidate):\\n  assert candidate(1, 2) == 3"          Python with the row's `entry_point`, or unittest

or one of the first four as JSON. Expected outputs and Python tests never enter the program's process. Outputs are
compared here; Python tests run in a sandbox of their own and call the program's functions over a socket (`wire` says
what that covers). `rlsys.sandbox.runner` says what the sandbox covers.

Programs and tests have the standard library and no packages. A program that is wrong, hangs, crashes or tries to get
out scores 0. What is not the program's fault raises: a row without usable tests, a host without a sandbox.
"""

import ast
import json
import os
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from rlsys import sandbox
from rlsys.errors import ConfigError
from rlsys.rewards.code.row_tests import ProgramTests, read_tests
from rlsys.sandbox import IsolationLevel, ProgramResult, SandboxError

PYTHON = ("python", "python3", "py")
TESTS_MB = 512
MIN_WALL_S = 0.1  # of a later test: enough to begin, so that a program which used up its time has timed out itself
MAX_NUMBER_CHARS = 40  # of numbers that are compared with a tolerance


def code(
    completion: str,
    tests: Any = None,
    entry_point: str | None = "",
    answer: Any = None,
    *,
    timeout_s: float = 6.0,
    memory_mb: int = 512,
    share: bool = False,
    tolerance: float = 0.0,
    unfenced: bool = False,
    isolation: str = "strongest",
) -> float:
    """1 if the program in the completion passes all tests; with `share`, the share of tests it passes, from 0 to 1.

    The program is the last fenced block marked as Python, or else the last unmarked one; with `unfenced`, the whole
    completion if there is no fence. `timeout_s` is the program's time for all tests together, and should be below the
    function's deadline. `tolerance` is the error allowed for a number, relative to the expected one where that is above
    1.
    """
    level = choose_level(isolation)
    program_tests = read_tests(answer if tests is None else tests, entry_point or "")
    program = extract_program(completion) if "```" in completion or not unfenced else completion
    if program is None:
        return 0.0
    trial = ProgramTrial(program, timeout_s, memory_mb, tolerance, level, stop_early=not share)
    run_tests = trial.run_io_tests if program_tests.io_pairs else trial.run_call_tests
    passed, count = run_tests(program_tests)
    return passed / count if share else float(passed == count)


@dataclass
class ProgramTrial:
    """A program and its limits."""

    program: str
    timeout_s: float
    memory_mb: int
    tolerance: float
    level: IsolationLevel
    stop_early: bool  # at the first test that fails
    results: list[ProgramResult] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Of the program's own time: the start of a sandbox does not count."""
        return self.timeout_s - sum(result.seconds for result in self.results)

    def run_io_tests(self, tests: ProgramTests) -> tuple[int, int]:
        """Runs the program once per input. Returns how many outputs are right, and how many there are."""
        passed = 0
        for stdin, expected in tests.io_pairs:
            right = self.seconds_left > 0 and self.passes_io_test(stdin, expected)
            passed += right
            if self.stop_early and not right:
                break
        if passed < len(tests.io_pairs) and (self.seconds_left <= 0 or self.results[-1].reason == "timeout"):
            require_processor(sum(result.seconds for result in self.results), self.results)
        return passed, len(tests.io_pairs)

    def passes_io_test(self, stdin: str, expected: str) -> bool:
        result = sandbox.run_program(
            self.program,
            stdin=stdin,
            wall_s=max(self.seconds_left, MIN_WALL_S),
            cpu_s=self.seconds_left,
            memory_mb=self.memory_mb,
            output_kb=64 + 2 * len(expected.encode()) // 1024,
            level=self.level,
        )
        self.results.append(result)
        return result.ok and same_output(result.stdout, expected, self.tolerance)

    def run_call_tests(self, tests: ProgramTests) -> tuple[int, int]:
        """Runs tests that call the program's functions. Returns how many pass, and how many there are."""
        job = {
            "pieces": tests.python_tests.pieces,
            "names": sorted(tests.python_tests.names),
            "modules": sorted(tests.python_tests.modules),
            "entry_point": tests.entry_point,
            "calls": tests.calls,
            "tolerance": self.tolerance,
            "stop_early": self.stop_early,
        }
        script = compile_calls()  # before the thread starts: CPython 3.11 cannot parse in two threads at the same time
        channels = [end.detach() for end in socket.socketpair()]
        with ThreadPoolExecutor(1) as pool:
            program = pool.submit(self.run_end, script, {"program": self.program}, channels[0], self.memory_mb)
            result = self.run_end(script, job, channels[1], TESTS_MB)
            self.results = [program.result(), result]
        lines = result.stdout.splitlines()
        if lines[:1] != ["ready"]:
            raise SandboxError(f"code: the tests did not begin ({result.reason}): {result.stderr[-300:]}")
        if lines[-1].startswith("unfit "):
            raise ValueError(f"code: {lines[-1].removeprefix('unfit ')}.")
        passed, count = lines.count("pass"), tests.python_tests.test_count + len(tests.calls)
        if passed < count and any(result.reason == "timeout" for result in self.results):
            require_processor(max(result.seconds for result in self.results), self.results)
        return passed, count

    def run_end(self, script: CodeType, job: dict[str, Any], channel: int, memory_mb: int) -> ProgramResult:
        """Runs one end of the conversation between tests and program."""
        return sandbox.run_program(
            script,
            stdin=json.dumps(job),
            wall_s=self.timeout_s,
            cpu_s=self.timeout_s,
            memory_mb=memory_mb,
            output_kb=256,
            channel=channel,
            level=self.level,
        )


def require_processor(seconds: float, results: list[ProgramResult]) -> None:
    """Raises `SandboxError` if programs waited for a processor for most of their time. They may keep each other waiting."""
    cpu, waited = sum(r.cpu_seconds for r in results), sum(r.waited_seconds for r in results)
    if waited > seconds / 2 and cpu < seconds / 2:
        raise SandboxError(
            f"a program waited {waited:.1f} of its {seconds:.1f} s for a processor: this machine is overloaded. Use fewer "
            "reward.workers, or a longer timeout_s."
        )


@cache
def compile_calls() -> CodeType:
    """Compiles `wire` and `calls` as one script, since a sandbox cannot import this package."""
    wire, calls = (ast.parse(Path(__file__).with_name(name).read_text()) for name in ("wire.py", "calls.py"))
    not_needed = ("__future__", "rlsys.rewards.code.wire")
    wire.body += [s for s in calls.body if not (isinstance(s, ast.ImportFrom) and s.module in not_needed)]
    return compile(wire, "calls.py", "exec")


# --- completions and outputs ------------------------------------------------------------------------------------------


def extract_program(completion: str) -> str | None:
    """Returns the completion's last block that is marked as Python, or else the last one without a mark.

    A block that is not closed does not count: it was cut off.
    """
    blocks: dict[bool, str] = {}  # the last one, by whether it is marked as Python
    fence, mark, indent = "", "", 0
    lines: list[str] = []
    for line in completion.splitlines():
        stripped = line.strip()
        if not fence and stripped.startswith("```"):
            fence = "`" * (len(stripped) - len(stripped.lstrip("`")))
            mark, lines, indent = stripped.strip("`").strip().lower(), [], len(line) - len(line.lstrip())
        elif fence and stripped.startswith(fence) and not stripped.strip("`"):
            language = re.split(r"[\s{]", mark)[0]
            if not language or language in PYTHON:
                blocks[bool(language)] = "\n".join(lines) + "\n"
            fence = ""
        elif fence:
            lines.append(line[indent:] if not line[:indent].strip() else line)  # a block inside a list is indented
    return blocks.get(True, blocks.get(False))


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """True if two outputs have the same words, with any blanks between them."""
    words, expected_words = output.split(), expected.split()
    if words == expected_words or not tolerance or len(words) != len(expected_words):
        return words == expected_words
    return all(w == e or same_number(w, e, tolerance) for w, e in zip(words, expected_words, strict=True))


def same_number(word: str, expected: str, tolerance: float) -> bool:
    if max(len(word), len(expected)) > MAX_NUMBER_CHARS:
        return False
    try:
        return abs(float(word) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
    except ValueError:
        return False


# --- options and the start of a run -----------------------------------------------------------------------------------


def choose_level(isolation: str) -> IsolationLevel:
    """Returns the level that the option `isolation` names. For "strongest", raises if this host has no safe level."""
    return sandbox.strongest_level() if isolation == "strongest" else IsolationLevel(isolation)


def check_code(options: Mapping[str, Any]) -> None:
    """Checks the options without trying a sandbox."""
    isolation = options.get("isolation", "strongest")
    if isolation not in ("strongest", *IsolationLevel):
        raise ConfigError(f"code: isolation is {isolation!r}; it is one of strongest, {', '.join(IsolationLevel)}.")
    for name in ("timeout_s", "memory_mb"):
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"code: {name} is {value!r}; it must be a number above 0.")


USED_LEVELS: set[IsolationLevel] = set()  # in this process


def prepare(options: Mapping[str, Any]) -> None:
    """Tries the sandbox once, so that a host without one is refused before the first sample."""
    try:
        level = choose_level(options.get("isolation", "strongest"))
        if problem := sandbox.why_unavailable(level):
            raise SandboxError(f"isolation: {level} does not work on {os.uname().nodename}: {problem}.")
    except SandboxError as error:
        raise ConfigError(f"code: {error}") from error
    USED_LEVELS.add(level)


def isolation_note() -> str:
    """Says how programs run in this process, after `prepare`."""
    return " ".join(sandbox.describe_level(level) for level in IsolationLevel if level in USED_LEVELS)
