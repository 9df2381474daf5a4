"""Tests that call a program's functions, when the program must not get hold of the tests.

    tests ──operation, arguments──▶ program         each in a sandbox of its own, over a socket; length, then JSON
          ◀──value, or exception──

Both ends are here, and both run inside: this file is the script, and its standard input says which end it is. What crosses are copies of
plain values: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, deque, Counter, OrderedDict, the
views of a dict, Decimal, Fraction, date, time, datetime, timedelta; of the tests' also what iterators give. Anything else stays where the
program made it, and the tests hold a `Remote` that asks for what they do with it.

So a program can answer whatever it likes, but it answers with values, and the tests compare them where it cannot reach: there is no
frame to look into, no `assert` to patch, no exit code to fake, no expected value in memory. A `Remote` is never equal to a plain value and
does no arithmetic with one, since either would ask the program whether it is right, and tell it what would be.
A function gets a copy of its arguments; what it changed in a list, deque, dict or set it was given is changed in the tests' too.

Not possible: to give the program anything else of the tests', a function or an object of their own class, which ends them with
`unfit`; to derive from its classes, or await its coroutines; to see what it prints.
Not covered: tests that have the program's own helpers or methods do the judging (`assert is_valid(solve(x))`) believe them.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, deque
from itertools import islice

TYPE_CHECKING = False  # `typing` would take as long to load as everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SOCKET = 3
LARGEST = 64 << 20  # bytes of a message
LONGEST = 100_000  # things that cross of an iterator of the tests; some never end
EXACT = (bool, int, float, str)
HOLDERS = (list, tuple, set, frozenset)
MAPPINGS = (dict, Counter, OrderedDict)
MUTABLE = (list, set, deque, *MAPPINGS)
VIEWS: dict[str, Callable[[Any], Any]] = {
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda items: dict(items).items(),
}
LISTED = (*HOLDERS, *(type(view(())) for view in VIEWS.values()))
WRITTEN = {
    "Decimal": "decimal",
    "Fraction": "fractions",
    "date": "datetime",
    "time": "datetime",
    "datetime": "datetime",
}  # what its text tells in full, and its module
PLAIN: tuple[Callable[[Any], Any], ...] = (bytes, int, float, str, *HOLDERS, dict)

# What the tests may ask the program to do with its own objects.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "int": int,
    "float": float,
    "hash": hash,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "neg": operator.neg,
    "abs": abs,
}
TOGETHER = (
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
    "matmul",
)
OPERATIONS |= {name: getattr(operator, name) for name in TOGETHER}


class Wire:
    """Whole messages over the socket."""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[os.write(SOCKET, data) :]

    def receive(self) -> Any:
        size = int.from_bytes(self.read(4), "big")
        if size > LARGEST:
            raise ConnectionError("a message is too large")
        return json.loads(self.read(size))

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            found = os.read(SOCKET, min(size, 1 << 20))
            if not found:
                raise ConnectionError("the other end is gone")
            parts.append(found)
            size -= len(found)
        return b"".join(parts)


def encode(value: Any, stays: Callable[[Any], Any]) -> Any:
    """A value as JSON; `stays` gives that of an object which does not cross."""
    kind = type(value)
    if value is None or kind in EXACT:
        return value
    if kind in LISTED:
        return [kind.__name__, [encode(v, stays) for v in value]]
    if kind in MAPPINGS:
        return [kind.__name__, [[encode(k, stays), encode(v, stays)] for k, v in value.items()]]
    if kind is deque:
        return ["deque", [[encode(v, stays) for v in value], value.maxlen]]
    if kind is range:
        return ["range", [value.start, value.stop, value.step]]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if WRITTEN.get(kind.__name__) == kind.__module__:
        return [kind.__name__, str(value)]
    if (kind.__module__, kind.__name__) == ("datetime", "timedelta"):
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    for plain in PLAIN:
        if isinstance(value, plain):  # type: ignore[arg-type]  # a named tuple, a defaultdict: equal to what is under it
            return encode(plain(value), stays)
    return stays(value)


def decode(message: Any, stayed: Callable[[str, Any], Any]) -> Any:
    """The value; `stayed` gives that of a kind which is not plain."""
    if not isinstance(message, list):
        return message
    kind, content = message
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(v, stayed) for v in content)
    if kind in VIEWS:
        return VIEWS[kind](decode(v, stayed) for v in content)
    if kind in ("dict", "Counter", "OrderedDict"):
        pairs = {decode(k, stayed): decode(v, stayed) for k, v in content}
        return pairs if kind == "dict" else Counter(pairs) if kind == "Counter" else OrderedDict(pairs)
    if kind == "deque":
        return deque((decode(v, stayed) for v in content[0]), content[1])
    if kind == "range":
        return range(*content)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind in WRITTEN:
        made = getattr(__import__(WRITTEN[kind]), kind)
        return getattr(made, "fromisoformat", made)(content)
    if kind == "timedelta":
        from datetime import timedelta

        return timedelta(*content)
    return stayed(kind, content)


# --- the program's end -------------------------------------------------------------------------------------------------------


class Program:
    """Runs the program, and does what the tests ask."""

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
        wanted = [name for name in self.wire.receive() if name in self.names]
        self.wire.send({name: self.describe(name, self.names[name]) for name in wanted})
        while True:
            try:
                operation, args, kwargs = self.wire.receive()
            except ConnectionError:
                os._exit(0)
            self.wire.send(self.answer(operation, args, kwargs))

    def answer(self, operation: str, sent: list[Any], named: dict[str, Any]) -> Any:
        try:
            args = [decode(a, self.object) for a in sent]
            result = OPERATIONS[operation](*args, **{k: decode(v, self.object) for k, v in named.items()})
            after = [encode(a, self.keep) if type(a) in MUTABLE else None for a in args]
            changed = {
                i: new for i, (old, new) in enumerate(zip(sent, after, strict=True)) if new is not None and new != old
            }
            return ["value", encode(result, self.keep), changed]
        except (Exception, SystemExit) as error:
            try:
                said = encode(list(error.args), self.keep)
            except Exception:
                said = ["list", []]
            return ["raised", [c.__name__ for c in type(error).__mro__], said]

    def describe(self, name: str, value: Any) -> Any:
        """What the tests take for a name of the program: [how, what]."""
        home = str(getattr(value, "__module__", None))
        if isinstance(value, type) and issubclass(value, Exception) and home == "program":
            return ["exception", next(c.__name__ for c in value.__mro__ if c.__module__ == "builtins")]
        if home.partition(".")[0] in sys.stdlib_module_names and getattr(sys.modules.get(home), name, None) is value:
            return ["from", home]
        return ["value", encode(value, self.keep)]

    def keep(self, value: Any) -> Any:
        self.objects.append(value)
        return ["remote", len(self.objects) - 1]

    def object(self, kind: str, content: Any) -> Any:
        """What the tests mean by one of its objects, or an iterator of theirs."""
        return iter([decode(v, self.object) for v in content]) if kind == "iterator" else self.objects[content]


# --- the tests' end ----------------------------------------------------------------------------------------------------------


class Remote:
    """An object of the program's, as the tests hold it."""

    __slots__ = ("_number", "_tests")

    def __init__(self, tests: Tests, number: int):
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._tests.ask(operation, self, *args, **kwargs)

    def _is(self, kind: type, operation: str, *args: Any) -> Any:
        """The answer, if it is exactly of this kind: nothing else may stand in for it."""
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
        return isinstance(value, Remote) and value._is(bool, "isinstance", self)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", key)

    def __len__(self) -> int:
        return self._is(int, "len")

    def __bool__(self) -> bool:
        return self._is(bool, "bool")

    def __int__(self) -> int:
        return self._is(int, "int")

    def __float__(self) -> float:
        return self._is(float, "float")

    def __str__(self) -> str:
        return self._is(str, "str")

    def __repr__(self) -> str:
        return self._is(str, "repr")

    def __hash__(self) -> int:
        return self._is(int, "hash")

    def __neg__(self) -> Any:
        return self._ask("neg")

    def __abs__(self) -> Any:
        return self._ask("abs")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._is(bool, "eq", other)


def together(operation: str) -> Callable[[Remote, Any], Any]:
    """An operator between two objects of the program's. With a plain value it is a TypeError."""

    def operate(self: Remote, other: Any) -> Any:
        return self._ask(operation, other) if isinstance(other, Remote) else NotImplemented

    return operate


for operation in TOGETHER[1:]:
    setattr(Remote, f"__{operation.rstrip('_')}__", together(operation))


class Tests:
    """Runs the tests one after the other. Prints `ready`, and `pass` or `fail` for each, or `unfit` and why."""

    def __init__(self, job: dict[str, Any]):
        self.wire, self.job = Wire(), job
        self.exceptions: dict[str, type[Exception]] = {}
        self.borrowed = False  # whether the program has said of a name what it is in this process
        self.names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        self.report = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what tests print is no verdict

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        sent = [encode(a, self.number) for a in args]
        self.wire.send([operation, sent, {k: encode(v, self.number) for k, v in kwargs.items()}])
        how, *answer = self.wire.receive()
        if how == "raised":
            kinds, said = answer
            raise self.exception(kinds)(*decode(said, self.remote))
        value, changed = answer
        for i, new in changed.items():
            update(args[int(i)], decode(new, self.remote))
        return decode(value, self.remote)

    def number(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Remote):
            return ["remote", value._number]
        if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            return ["iterator", [encode(v, self.number) for v in islice(value, LONGEST)]]
        problem = f"a {kind.__name__} of the tests cannot be given to the program"
        if not self.borrowed:  # else the program may have put it there, to fail rather than be wrong
            self.say(f"unfit {problem}")
            os._exit(0)  # tests may catch whatever is raised
        raise TypeError(problem)

    def remote(self, kind: str, number: Any) -> Remote:
        if kind != "remote":
            raise ValueError(f"{kind!r} is no kind of value")
        return Remote(self, int(number))

    def exception(self, kinds: list[str]) -> type[Exception]:
        """The tests' own class for an exception of the program's, found by its name and those of its bases."""
        for kind in kinds:
            found = self.exceptions.get(kind) or getattr(builtins, str(kind), None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        return RuntimeError

    def take(self, name: str, how: str, what: Any) -> None:
        """Makes a name of the program's known to the tests."""
        self.borrowed |= how != "value"
        if how == "value":
            self.names[name] = decode(what, self.remote)
        elif how == "exception":
            self.names[name] = self.exceptions[name] = type(name, (self.exception([what]),), {})
        elif how == "from" and what.partition(".")[0] in sys.stdlib_module_names:
            self.names[name] = getattr(__import__(what, fromlist=[name]), name)  # the program may have changed its own

    def run(self) -> None:
        entry, stop = self.job["entry_point"], self.job["stop"]
        self.say("ready")
        try:
            self.wire.send(sorted({*self.job["names"], "Solution"} - set(dir(builtins)) | {entry}))
            offered = self.wire.receive()
            if entry.isidentifier() and entry not in offered and "Solution" in offered:
                entry = f"Solution().{entry}"
            for name, (how, what) in offered.items():
                self.take(name, how, what)
            for name in self.job["modules"]:  # the tests' own, whatever the program calls so
                self.names[name] = __import__(name)
            self.names["run_case"] = run_case
            if entry:
                self.names["candidate"] = eval(entry, self.names)
        except Exception as error:  # the program has failed, or what it offers is nonsense
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
            return
        for source, is_test in self.job["pieces"]:
            passed = self.passes(lambda source=source: exec(source, self.names), is_test)  # type: ignore[misc]
            if stop and not passed:
                return
        for args, right in self.job["calls"]:
            passed = self.passes(lambda args=args, right=right: self.call(args, right))  # type: ignore[misc]
            if stop and not passed:
                return

    def passes(self, action: Callable[[], Any], is_test: bool = True) -> bool:
        try:
            action()
            passed = True
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
            passed = False
        if is_test:
            self.say("pass" if passed else "fail")
        return passed

    def call(self, args: list[Any], right: list[Any]) -> None:
        """Raises if the function returns none of what is right."""
        got = self.names["candidate"](*args)
        assert any(same(got, expected, self.job["tolerance"]) for expected in right), f"{got!r}"

    def say(self, line: str) -> None:
        print(line, file=self.report, flush=True)


def run_case(case: Any, method: str) -> None:
    """One method of a `unittest.TestCase`."""
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([case(method)]).run(result)
    if not result.wasSuccessful() or result.skipped:
        raise AssertionError(str(result.failures or result.errors or result.skipped)[-500:])


def update(old: Any, new: Any) -> None:
    """Makes a list, deque, dict or set what it has become at the other end."""
    if type(old) is type(new) and type(old) in MUTABLE:
        old.clear()
        old.extend(new) if isinstance(old, list | deque) else old.update(new)


def same(got: Any, expected: Any, tolerance: float) -> bool:
    """Whether a returned value is an expected one that has been JSON: tuples are lists in it, and keys are texts."""
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(same(g, e, tolerance) for g, e in zip(got, expected, strict=True))
    if isinstance(got, dict) and isinstance(expected, dict):
        mine, theirs = ({str(k): v for k, v in d.items()} for d in (got, expected))
        return mine.keys() == theirs.keys() and all(same(mine[k], theirs[k], tolerance) for k in mine)
    if tolerance and type(got) in (int, float) and type(expected) in (int, float):
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    return bool(got == expected)


def main() -> None:
    job = json.load(sys.stdin)
    if "program" in job:
        Program(job["program"]).serve()
    else:
        Tests(job).run()


if __name__ == "__main__":
    main()
