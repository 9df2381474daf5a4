"""Both ends of the conversation that `wire` describes: the process of a program, and the process of its tests.

`wire` and this file are compiled together as one script, which runs in both sandboxes. Its standard input says which
end it is: `{"program": …}` is the program, `{"pieces": …, "calls": …, …}` are the tests.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
from collections import deque
from itertools import islice

from rlsys.rewards.code.wire import MUTABLE, Wire, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_ITERATOR_ITEMS = 100_000  # that cross; some iterators never end
BUILTINS = "getattr setattr isinstance iter next len str repr bool int float hash abs".split()  # noqa: SIM905
BINARY_OPERATORS = "lt le gt ge add sub mul truediv floordiv mod and_ or_ xor matmul".split()  # noqa: SIM905

# What the tests may ask the program to do with its own objects.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    **{name: getattr(builtins, name) for name in BUILTINS},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "neg", "eq", *BINARY_OPERATORS)},
}


# --- the program's end ------------------------------------------------------------------------------------------------


class ProgramEnd:
    """Runs the program, and performs what the tests ask for on its objects."""

    def __init__(self, source: str):
        self.wire, self.objects = Wire(), [None]
        module = type(sys)("program")
        sys.modules["program"] = module
        try:  # noqa: SIM105  contextlib takes long to load
            exec(compile(source, "program.py", "exec"), vars(module))
        except SystemExit:
            pass
        self.names = vars(module)

    def serve(self) -> None:
        defined = [name for name in self.wire.receive() if name in self.names]
        self.wire.send({name: self.describe(name, self.names[name]) for name in defined})
        while True:
            try:
                operation, args, kwargs = self.wire.receive()
            except ConnectionError:
                os._exit(0)
            self.wire.send(self.perform(operation, args, kwargs))

    def perform(self, operation: str, sent: list[Any], sent_by_name: dict[str, Any]) -> Any:
        """Returns ["value", result, {index: changed argument}], or ["raised", names of classes, arguments]."""
        try:
            args = [decode(a, self.decode_object) for a in sent]
            kwargs = {k: decode(v, self.decode_object) for k, v in sent_by_name.items()}
            result = OPERATIONS[operation](*args, **kwargs)
            after = [encode(a, self.encode_object) if type(a) in MUTABLE else None for a in args]
            changed = {
                i: new for i, (old, new) in enumerate(zip(sent, after, strict=True)) if new is not None and new != old
            }
            return ["value", encode(result, self.encode_object), changed]
        except (Exception, SystemExit) as error:
            try:
                arguments = encode(list(error.args), self.encode_object)
            except Exception:
                arguments = ["list", []]
            return ["raised", [c.__name__ for c in type(error).__mro__], arguments]

    def describe(self, name: str, value: Any) -> Any:
        """Returns what a name is to the tests: ["exception", base], ["stdlib", module] or ["value", the value]."""
        module = str(getattr(value, "__module__", None))
        if isinstance(value, type) and issubclass(value, Exception) and module == "program":
            return ["exception", next(c.__name__ for c in value.__mro__ if c.__module__ == "builtins")]
        from_stdlib = module.partition(".")[0] in sys.stdlib_module_names
        if from_stdlib and getattr(sys.modules.get(module), name, None) is value:
            return ["stdlib", module]
        return ["value", encode(value, self.encode_object)]

    def encode_object(self, value: Any) -> Any:
        """Keeps an object here, and sends its number."""
        self.objects.append(value)
        return ["remote", len(self.objects) - 1]

    def decode_object(self, kind: str, content: Any) -> Any:
        """Returns the object of a number, or an iterator over the items of one of the tests' iterators."""
        return iter([decode(v, self.decode_object) for v in content]) if kind == "iterator" else self.objects[content]


# --- the tests' end ---------------------------------------------------------------------------------------------------


class Remote:
    """An object of the program, as the tests hold it. All operations on it are done by the program."""

    __slots__ = ("_number", "_tests")

    def __init__(self, tests: TestsEnd, number: int):
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._tests.ask(operation, self, *args, **kwargs)

    def _ask_for(self, kind: type, operation: str, *args: Any) -> Any:
        """Returns the answer if it is exactly of this type: nothing else may stand in for it."""
        if type(answer := self._ask(operation, *args)) is not kind:
            raise TypeError(f"{operation} gave no {kind.__name__}")
        return answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and value._ask_for(bool, "isinstance", self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask_for(bool, "eq", other)

    def __hash__(self) -> int:
        return self._ask_for(int, "hash")


def _forward(operation: str) -> Callable[..., Any]:
    """Makes a special method that the program performs."""
    return lambda self, *args: self._ask(operation, *args)


def _forward_for(kind: type, operation: str) -> Callable[[Remote], Any]:
    """Makes a special method whose answer must be exactly of this type."""
    return lambda self: self._ask_for(kind, operation)


def _forward_binary(operation: str) -> Callable[[Remote, Any], Any]:
    """Makes an operator between two objects of the program. With a plain value it is a TypeError."""
    return lambda self, other: self._ask(operation, other) if isinstance(other, Remote) else NotImplemented


for name in ("iter", "next", "getitem", "setitem", "delitem", "neg", "abs"):
    setattr(Remote, f"__{name}__", _forward(name))
for name, kind in {"len": int, "bool": bool, "int": int, "float": float, "str": str, "repr": str}.items():
    setattr(Remote, f"__{name}__", _forward_for(kind, name))
for name in BINARY_OPERATORS:
    setattr(Remote, f"__{name.rstrip('_')}__", _forward_binary(name))


class TestsEnd:
    """Runs the tests in order. Prints `ready`, then `pass` or `fail` for each, or `unfit` with the reason."""

    def __init__(self, job: dict[str, Any]):
        self.wire, self.job = Wire(), job
        self.exceptions: dict[str, type[Exception]] = {}
        self.program_chose_names = False  # whether the program has said which class or function a name stands for here
        self.names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        self.report = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what tests print is no result

    def run(self) -> None:
        self.say("ready")
        try:
            self.import_names()
        except Exception as error:  # the program has failed, or what it offers is nonsense
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
            return
        stop_early = self.job["stop_early"]
        for source, is_test in self.job["pieces"]:
            passed = self.run_test(lambda source=source: exec(source, self.names), is_test)  # type: ignore[misc]
            if stop_early and not passed:
                return
        for call in self.job["calls"]:
            passed = self.run_test(lambda call=call: self.check_call(*call))  # type: ignore[misc]
            if stop_early and not passed:
                return

    def import_names(self) -> None:
        """Asks the program for the names that the tests use, and adds the tests' own."""
        entry = self.job["entry_point"]
        self.wire.send(sorted({*self.job["names"], "Solution"} - set(dir(builtins)) | {entry}))
        offered = self.wire.receive()
        if entry.isidentifier() and entry not in offered and "Solution" in offered:
            entry = f"Solution().{entry}"
        for name, (how, content) in offered.items():
            self.define(name, how, content)
        for name in self.job["modules"]:  # the real ones, whatever the program calls so
            self.names[name] = __import__(name)
        self.names["run_case"] = run_case
        if entry:
            self.names["candidate"] = eval(entry, self.names)

    def define(self, name: str, how: str, content: Any) -> None:
        """Defines a name of the program for the tests, as `ProgramEnd.describe` says."""
        self.program_chose_names |= how != "value"
        if how == "value":
            self.names[name] = decode(content, self.decode_object)
        elif how == "exception":
            self.names[name] = self.exceptions[name] = type(name, (self.exception_class([content]),), {})
        elif how == "stdlib" and content.partition(".")[0] in sys.stdlib_module_names:
            # Imported here: the program may have changed its own.
            self.names[name] = getattr(__import__(content, fromlist=[name]), name)

    def run_test(self, action: Callable[[], Any], is_test: bool = True) -> bool:
        try:
            action()
            passed = True
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
            passed = False
        if is_test:
            self.say("pass" if passed else "fail")
        return passed

    def check_call(self, args: list[Any], accepted: list[Any]) -> None:
        """Raises if the function returns none of the accepted results."""
        result = self.names["candidate"](*args)
        assert any(same_result(result, expected, self.job["tolerance"]) for expected in accepted), f"{result!r}"

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Has the program perform an operation; returns its result, or raises its exception."""
        sent = [encode(a, self.encode_object) for a in args]
        self.wire.send([operation, sent, {k: encode(v, self.encode_object) for k, v in kwargs.items()}])
        how, *answer = self.wire.receive()
        if how == "raised":
            class_names, arguments = answer
            raise self.exception_class(class_names)(*decode(arguments, self.decode_object))
        value, changed = answer
        for i, new in changed.items():
            update_in_place(args[int(i)], decode(new, self.decode_object))
        return decode(value, self.decode_object)

    def encode_object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Remote):
            return ["remote", value._number]
        if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            return ["iterator", [encode(v, self.encode_object) for v in islice(value, MAX_ITERATOR_ITEMS)]]
        problem = f"a {kind.__name__} of the tests cannot be given to the program"
        if not self.program_chose_names:  # else the program may have put it there, to fail rather than be wrong
            self.say(f"unfit {problem}")
            os._exit(0)  # tests may catch whatever is raised
        raise TypeError(problem)

    def decode_object(self, kind: str, number: Any) -> Remote:
        if kind != "remote":
            raise ValueError(f"{kind!r} is no kind of value")
        return Remote(self, int(number))

    def exception_class(self, class_names: list[str]) -> type[Exception]:
        """Finds the tests' own class for an exception of the program, by its name and those of its bases."""
        for name in class_names:
            candidate = self.exceptions.get(name) or getattr(builtins, str(name), None)
            if isinstance(candidate, type) and issubclass(candidate, Exception):
                return candidate
        return RuntimeError

    def say(self, line: str) -> None:
        print(line, file=self.report, flush=True)


def run_case(case: Any, method: str) -> None:
    """Runs one method of a `unittest.TestCase`."""
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([case(method)]).run(result)
    if not result.wasSuccessful() or result.skipped:
        raise AssertionError(str(result.failures or result.errors or result.skipped)[-500:])


def update_in_place(old: Any, new: Any) -> None:
    """Makes a list, deque, dict or set equal to what it has become at the other end."""
    if type(old) is type(new) and type(old) in MUTABLE:
        old.clear()
        old.extend(new) if isinstance(old, list | deque) else old.update(new)


def same_result(result: Any, expected: Any, tolerance: float) -> bool:
    """True if a result equals an expected one that has been JSON, where tuples are lists and keys are texts."""
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(result, expected, strict=False)
        return len(result) == len(expected) and all(same_result(r, e, tolerance) for r, e in pairs)
    if isinstance(result, dict) and isinstance(expected, dict):
        ours, theirs = ({str(k): v for k, v in d.items()} for d in (result, expected))
        return ours.keys() == theirs.keys() and all(same_result(ours[k], theirs[k], tolerance) for k in ours)
    if tolerance and type(result) in (int, float) and type(expected) in (int, float):
        return abs(result - expected) <= tolerance * max(1.0, abs(expected))
    return bool(result == expected)


def main() -> None:
    job = json.load(sys.stdin)
    if "program" in job:
        ProgramEnd(job["program"]).serve()
    else:
        TestsEnd(job).run()


if __name__ == "__main__":
    main()
