"""The reward `code`: runs the program in a completion against tests.

The tests are the row's field `tests`, or else its answer: the field that `data.answer_key` names. What they may be:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                      what is given on standard input, and what is to be printed
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}          arguments of a function, and what it is to return
    [{"input": "1 2\\n", "output": "3\\n"}]                          the first form, one by one
    ["assert add(1, 2) == 3"]                                       Python, each text a test
    "def check(candidate):\\n    assert candidate(1, 2) == 3"        Python, with the row's `entry_point`; or with asserts, or unittest

or one of the first four as JSON. Expected outputs and Python tests never enter the program's process: outputs are compared here, and
Python tests run in a sandbox of their own and call the program's functions over a wire (`calls`, which says what that covers).
`rlsys.sandbox.runner` says what the sandbox covers.

Programs and tests have the standard library and no packages. A program that is wrong, hangs, crashes, or tries to get out scores 0. What raises is not the program's doing: a row without usable tests,
a host without a sandbox.
"""

import contextlib
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

from rlsys.config.schema import ConfigError
from rlsys.rewards.code.python_tests import PythonTests, split_tests
from rlsys.sandbox import runner
from rlsys.sandbox.runner import IsolationLevel, SandboxError

PYTHON = ("python", "python3", "py")
TESTS_MB = 512
MAX_NUMBER_CHARS = 40  # characters of a number, when numbers are compared


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
    """1 if the program in the completion passes all tests; with `share`, how many of them it passes, from 0 to 1.

    The program is the last fenced block marked as Python, or else the last unmarked one; with `unfenced`, the whole completion if there is
    no fence. `timeout_s` is what the program may take for all tests together, and should be below the function's deadline. `tolerance` is how far a number may be
    off, relative to the expected one where that is above 1.
    """
    level = choose_level(isolation)
    wanted = read_tests(answer if tests is None else tests, entry_point or "")
    program = extract_program(completion) if "```" in completion or not unfenced else completion
    if program is None:
        return 0.0
    trial = ProgramTrial(program, timeout_s, memory_mb, tolerance, level, stop_early=not share)
    if wanted.io_pairs:
        passed, count = trial.run_io_tests(wanted.io_pairs)
    else:
        passed, count = trial.run_call_tests(wanted)
    return passed / count if share else float(passed == count)


@dataclass(frozen=True)
class ProgramTests:
    """What a row asks of a program: one of the three.

    `Wanted(pairs=[("1 2", "3")])`, `Wanted(entry_point="add", calls=[([1, 2], [3])])`, or `Wanted(plan=…)` for Python
    """

    io_pairs: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[list[Any], list[Any]]] = field(default_factory=list)  # arguments, and results that are right
    python_tests: PythonTests = field(default_factory=lambda: PythonTests([], set(), set()))
    entry_point: str = ""


@dataclass
class ProgramTrial:
    """A program and its limits."""

    program: str
    timeout_s: float
    memory_mb: int
    tolerance: float
    level: IsolationLevel
    stop_early: bool  # at the first test that fails

    def __post_init__(self) -> None:
        self.seconds_left = (
            self.timeout_s
        )  # of the program's own seconds: those that a sandbox takes to start are not its doing

    def run_io_tests(self, pairs: list[tuple[str, str]]) -> tuple[int, int]:
        """How many of the pairs are right, and how many there are."""
        passed = 0
        for given, expected in pairs:
            right = self.seconds_left > 0 and self.passes_io_test(given, expected)
            passed += right
            if self.stop_early and not right:
                break
        return passed, len(pairs)

    def passes_io_test(self, given: str, expected: str) -> bool:
        ran = runner.run_program(
            self.program,
            stdin=given,
            wall_s=self.seconds_left,
            cpu_s=self.seconds_left,
            memory_mb=self.memory_mb,
            output_kb=64 + 2 * len(expected.encode()) // 1024,
            level=self.level,
        )
        self.seconds_left -= ran.seconds
        return ran.ok and same_output(ran.stdout, expected, self.tolerance)

    def run_call_tests(self, wanted: ProgramTests) -> tuple[int, int]:
        """How many tests pass, and how many there are."""
        job = {
            "pieces": wanted.python_tests.pieces,
            "names": sorted(wanted.python_tests.names),
            "modules": sorted(wanted.python_tests.modules),
            "entry_point": wanted.entry_point,
            "calls": wanted.calls,
            "tolerance": self.tolerance,
            "stop": self.stop_early,
        }
        ends = [end.detach() for end in socket.socketpair()]
        with ThreadPoolExecutor(1) as pool:
            program = pool.submit(self.run_end, {"program": self.program}, ends[0], self.memory_mb)
            tests = self.run_end(job, ends[1], TESTS_MB)
            program.result()
        lines = tests.stdout.splitlines()
        if lines[:1] != ["ready"]:
            raise SandboxError(f"code: the tests did not begin ({tests.reason}): {tests.stderr[-300:]}")
        if lines[-1].startswith("unfit "):
            raise ValueError(f"code: {lines[-1].removeprefix('unfit ')}.")
        return lines.count("pass"), wanted.python_tests.test_count + len(wanted.calls)

    def run_end(self, job: dict[str, Any], channel: int, memory_mb: int) -> runner.ProgramResult:
        """One end of the wire."""
        return runner.run_program(
            compile_calls(),
            stdin=json.dumps(job),
            wall_s=self.timeout_s,
            cpu_s=self.timeout_s,
            memory_mb=memory_mb,
            output_kb=256,
            channel=channel,
            level=self.level,
        )


@cache
def compile_calls() -> CodeType:
    """Both ends, compiled once."""
    return compile(Path(__file__).with_name("calls.py").read_bytes(), "calls.py", "exec")


# --- what a completion holds, and what a row wants ---------------------------------------------------------------------------


def extract_program(completion: str) -> str | None:
    """The last block of the completion that is marked as Python, or else the last one that is not marked at all.

    A block that is not closed is not there: it was cut off.
    """
    found: dict[bool, str] = {}
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
                found[bool(language)] = "\n".join(lines) + "\n"
            fence = ""
        elif fence:
            lines.append(line[indent:] if not line[:indent].strip() else line)  # a block inside a list is indented
    return found.get(True, found.get(False))


def read_tests(tests: Any, entry_point: str) -> ProgramTests:
    """What a row's tests ask for. Raises a sentence if that cannot be told."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # then it is Python
            tests = json.loads(tests)
    match tests:
        case str() if tests.strip():
            return read_python_tests(tests, entry_point)
        case [str(), *_] if all(isinstance(t, str) for t in tests):
            return read_python_tests(tests, entry_point)
        case [Mapping(), *_]:
            tests = {"inputs": [t.get("input") for t in tests], "outputs": [t.get("output") for t in tests]}
    match tests:
        case {"inputs": [_, *_] as inputs, "outputs": [_, *_] as outputs} if len(inputs) == len(outputs):
            name = tests.get("fn_name") or entry_point
            if name:
                calls = [(parse_arguments(i), accepted_results(i, o)) for i, o in zip(inputs, outputs, strict=True)]
                return ProgramTests(calls=calls, entry_point=name)
            return ProgramTests(io_pairs=[(join_lines(i), join_lines(o)) for i, o in zip(inputs, outputs, strict=True)])
    raise ValueError(
        f"code: the row's tests are {str(tests)[:200]!r}; they must be Python, a list of asserts, or inputs and as many outputs."
    )


def read_python_tests(tests: str | list[str], entry_point: str) -> ProgramTests:
    made = split_tests(tests, entry_point)
    if not made.test_count:
        raise ValueError(
            "code: the row's tests test nothing: no assert, no call, no test function, no `check` with an entry_point."
        )
    return ProgramTests(python_tests=made, entry_point=entry_point)


def join_lines(value: Any) -> str:
    """What is read or printed; some data sets have it line by line."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if value is None:
        raise ValueError("code: a test has no input or no output.")
    return str(value)


def parse_arguments(value: Any) -> list[Any]:
    """A function's arguments; some data sets have each on a line of its own, as JSON."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def accepted_results(given: Any, output: Any) -> list[Any]:
    """What may be returned for what is given.  "[1]", "[3]" -> [3], 3;  ["1"], "3" -> "3", 3

    Where arguments are JSON, so are results. Elsewhere a text may be JSON or what it says, since data sets have both.
    """
    found = [output]
    if isinstance(output, str):
        with contextlib.suppress(ValueError):
            value = json.loads(output)
            found = [value] if isinstance(given, str) else [output, value]
    return found + [f[0] for f in found if isinstance(f, list) and len(f) == 1]  # some data sets wrap a result


def same_output(got: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs are the same words, whatever lies between them."""
    mine, theirs = got.split(), expected.split()
    return mine == theirs or bool(
        tolerance
        and len(mine) == len(theirs)
        and all(m == t or same_number(m, t, tolerance) for m, t in zip(mine, theirs, strict=True))
    )


def same_number(got: str, expected: str, tolerance: float) -> bool:
    if max(len(got), len(expected)) > MAX_NUMBER_CHARS:
        return False
    try:
        return abs(float(got) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
    except ValueError:
        return False


# --- the start of a run ------------------------------------------------------------------------------------------------------


def choose_level(isolation: str) -> IsolationLevel:
    """The level that the option `isolation` names. "strongest" refuses a host that has none which is safe."""
    return runner.strongest_level() if isolation == "strongest" else IsolationLevel(isolation)


def check_code(options: Mapping[str, Any]) -> None:
    """What is wrong with the options, without trying anything."""
    isolation = options.get("isolation", "strongest")
    if isolation not in ("strongest", *IsolationLevel):
        raise ConfigError(f"code: isolation is {isolation!r}; it is one of strongest, {', '.join(IsolationLevel)}.")
    for name in ("timeout_s", "memory_mb"):
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"code: {name} is {value!r}; it must be a number above 0.")


USED_LEVELS: set[IsolationLevel] = set()


def prepare(options: Mapping[str, Any]) -> None:
    """Tries the sandbox once, so that a host without one is refused before the first sample."""
    try:
        level = choose_level(options.get("isolation", "strongest"))
        if problem := runner.why_unavailable(level):
            raise SandboxError(f"isolation: {level} does not work on {os.uname().nodename}: {problem}.")
    except SandboxError as error:
        raise ConfigError(f"code: {error}") from error
    USED_LEVELS.add(level)


def isolation_note() -> str:
    """How programs run in this process, after `prepare`."""
    return " ".join(runner.describe_level(level) for level in IsolationLevel if level in USED_LEVELS)
