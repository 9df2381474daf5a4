"""The tests in a data row: reads each of their forms, which `program` lists."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.rewards.code.python_tests import PythonTests, split_tests


@dataclass(frozen=True)
class ProgramTests:
    """What a row asks of a program, in one of three forms.

    `ProgramTests(io_pairs=[("1 2", "3")])`, `ProgramTests(entry_point="add", calls=[([1, 2], [3])])`, or
    `ProgramTests(python_tests=…)`
    """

    io_pairs: list[tuple[str, str]] = field(default_factory=list)  # standard input, expected output
    calls: list[tuple[list[Any], list[Any]]] = field(default_factory=list)  # arguments, accepted results
    python_tests: PythonTests = field(default_factory=lambda: PythonTests([], set(), set()))
    entry_point: str = ""


def read_tests(tests: Any, entry_point: str) -> ProgramTests:
    """Reads a row's tests. Raises `ValueError` with a sentence if they have none of the forms."""
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
            pairs = list(zip(inputs, outputs, strict=True))
            name = tests.get("fn_name") or entry_point
            if name:
                calls = [(parse_arguments(i), accepted_results(i, o)) for i, o in pairs]
                return ProgramTests(calls=calls, entry_point=name)
            return ProgramTests(io_pairs=[(join_lines(i), join_lines(o)) for i, o in pairs])
    raise ValueError(
        f"code: the row's tests are {str(tests)[:200]!r}; they must be Python, a list of asserts, or inputs and as "
        "many outputs."
    )


def read_python_tests(tests: str | list[str], entry_point: str) -> ProgramTests:
    python_tests = split_tests(tests, entry_point)
    if not python_tests.test_count:
        raise ValueError(
            "code: the row's tests test nothing: no assert, no call, no test function, no `check` with an entry_point."
        )
    return ProgramTests(python_tests=python_tests, entry_point=entry_point)


def join_lines(value: Any) -> str:
    """Returns an input or output as one text; some data sets have it line by line."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if value is None:
        raise ValueError("code: a test has no input or no output.")
    return str(value)


def parse_arguments(value: Any) -> list[Any]:
    """Returns a function's arguments; some data sets have each on a line of its own, as JSON."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def accepted_results(arguments: Any, output: Any) -> list[Any]:
    """Returns the results that count as right.  "[1]", "[3]" -> [3], 3;  ["1"], "3" -> "3", 3

    Where arguments are JSON, so are results. Elsewhere a text may be JSON or a plain text, since data sets have both.
    """
    accepted = [output]
    if isinstance(output, str):
        with contextlib.suppress(ValueError):
            value = json.loads(output)
            accepted = [value] if isinstance(arguments, str) else [output, value]
    return accepted + [a[0] for a in accepted if isinstance(a, list) and len(a) == 1]  # some data sets wrap a result
