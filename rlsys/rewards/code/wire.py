"""The conversation between Python tests and a program that must not get hold of the tests.

    tests ──operation, arguments──▶ program         each in a sandbox of its own, over a socket
          ◀──value, or exception──                  a message is four bytes of length, then JSON

This file says what crosses; `calls` has the two ends. Copies of plain values cross: None, bool, int, float, complex,
str, bytes, list, tuple, dict, set, frozenset, range, deque, Counter, OrderedDict, the views of a dict, Decimal,
Fraction, date, time, datetime and timedelta. From the tests also the items of an iterator cross. Any other object stays
where the program made it; the tests hold a `Remote` in its place, which asks the program for each thing the tests do
with it.

A function gets a copy of its arguments. If it changes a list, deque, dict or set that it was given, the tests' own one
changes too.

A program may answer whatever it likes, but it answers with values, and the tests compare them in another process. There
is no frame to inspect, no `assert` to patch, no exit code to fake and no expected value in memory. A `Remote` never
equals a plain value and does no arithmetic with one: either would ask the program whether it is right, and tell it the
expected value.

Not possible: giving the program a function of the tests or an object of their own class, which ends the tests with
`unfit`; deriving from the program's classes; awaiting its coroutines; seeing what it prints. Not covered: tests that
let the program's own helpers or methods judge (`assert is_valid(solve(x))`) believe them.
"""

from __future__ import annotations

import builtins
import json
import os
from collections import Counter, OrderedDict, deque

TYPE_CHECKING = False  # `typing` would take as long to load as everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SOCKET_FD = 3
MAX_MESSAGE_BYTES = 64 << 20
SCALARS = (bool, int, float, str)
COLLECTIONS = (list, tuple, set, frozenset)
MAPPINGS = (dict, Counter, OrderedDict)
MUTABLE = (list, set, deque, *MAPPINGS)
DICT_VIEWS: dict[str, Callable[[Any], Any]] = {
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda items: dict(items).items(),
}
SENT_AS_LIST = (*COLLECTIONS, *(type(view(())) for view in DICT_VIEWS.values()))
# Types whose text holds the whole value, with their modules.
SENT_AS_TEXT = {
    "Decimal": "decimal",
    "Fraction": "fractions",
    "date": "datetime",
    "time": "datetime",
    "datetime": "datetime",
}
# An instance of a subclass, such as a named tuple, crosses as the base it equals.
PLAIN_BASES: tuple[Callable[[Any], Any], ...] = (bytes, int, float, str, *COLLECTIONS, dict)


class Wire:
    """Sends and receives whole messages over the socket."""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[os.write(SOCKET_FD, data) :]

    def receive(self) -> Any:
        size = int.from_bytes(self.read(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionError("a message is too large")
        return json.loads(self.read(size))

    def read(self, size: int) -> bytes:
        chunks = []
        while size:
            chunk = os.read(SOCKET_FD, min(size, 1 << 20))
            if not chunk:
                raise ConnectionError("the other end has closed")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def encode(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    """Encodes a value as JSON.  (1, [2]) -> ["tuple", [1, ["list", [2]]]]

    `encode_object` encodes an object that does not cross as a copy.
    """
    kind = type(value)
    if value is None or kind in SCALARS:
        return value
    if kind in SENT_AS_LIST:
        return [kind.__name__, [encode(v, encode_object) for v in value]]
    if kind in MAPPINGS:
        return [kind.__name__, [[encode(k, encode_object), encode(v, encode_object)] for k, v in value.items()]]
    if kind is deque:
        return ["deque", [[encode(v, encode_object) for v in value], value.maxlen]]
    if kind is range:
        return ["range", [value.start, value.stop, value.step]]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if SENT_AS_TEXT.get(kind.__name__) == kind.__module__:
        return [kind.__name__, str(value)]
    if (kind.__module__, kind.__name__) == ("datetime", "timedelta"):
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    for base in PLAIN_BASES:
        if isinstance(value, base):  # type: ignore[arg-type]
            return encode(base(value), encode_object)
    return encode_object(value)


def decode(message: Any, decode_object: Callable[[str, Any], Any]) -> Any:
    """Returns the value of an encoded one. `decode_object` decodes the kinds that are not plain values."""
    if not isinstance(message, list):
        return message
    kind, content = message
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(v, decode_object) for v in content)
    if kind in DICT_VIEWS:
        return DICT_VIEWS[kind](decode(v, decode_object) for v in content)
    if kind in ("dict", "Counter", "OrderedDict"):
        pairs = {decode(k, decode_object): decode(v, decode_object) for k, v in content}
        return pairs if kind == "dict" else Counter(pairs) if kind == "Counter" else OrderedDict(pairs)
    if kind == "deque":
        return deque((decode(v, decode_object) for v in content[0]), content[1])
    if kind == "range":
        return range(*content)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind in SENT_AS_TEXT:
        constructor = getattr(__import__(SENT_AS_TEXT[kind]), kind)
        return getattr(constructor, "fromisoformat", constructor)(content)
    if kind == "timedelta":
        from datetime import timedelta

        return timedelta(*content)
    return decode_object(kind, content)
