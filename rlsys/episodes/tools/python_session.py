"""Runs inside the sandbox: pieces of code come in, what they print goes out, and variables stay.

    caller ──length, code──▶ session ──length, output──▶ caller      over file descriptor 3

The script does not import the package. Of a long output only the beginning and the end are kept in memory.
"""

import ast
import io
import linecache
import os
import struct
import traceback
from collections import deque
from contextlib import redirect_stderr, redirect_stdout

CHANNEL = 3


class BoundedOutput(io.TextIOBase):
    """Keeps the beginning and the end of what is written."""

    def __init__(self, limit: int):
        self.room = limit // 2
        self.head: list[str] = []
        self.tail: deque[str] = deque()
        self.tail_room, self.tail_size, self.left_out = limit - self.room, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.head.append(text[: self.room])
        rest = text[self.room :]
        self.room -= len(self.head[-1])
        if len(rest) > self.tail_room:
            self.left_out += len(rest) - self.tail_room
            rest = rest[-self.tail_room :]
        self.tail.append(rest)
        self.tail_size += len(rest)
        while self.tail_size - len(self.tail[0]) >= self.tail_room:
            self.tail_size -= len(self.tail[0])
            self.left_out += len(self.tail.popleft())
        return len(text)

    def value(self) -> str:
        tail = "".join(self.tail)
        left_out = self.left_out + max(0, len(tail) - self.tail_room)
        tail = tail[-self.tail_room :] if tail else ""
        middle = f"\n[… {left_out:,} characters left out …]\n" if left_out else ""
        return "".join(self.head) + middle + tail


class Session:
    """One namespace for all pieces of code."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.count = 0

    def run(self, code: str, limit: int) -> str:
        self.count += 1
        file = f"<call {self.count}>"
        linecache.cache[file] = (len(code), None, [line + "\n" for line in code.splitlines()], file)
        output = BoundedOutput(limit)
        with redirect_stdout(output), redirect_stderr(output):
            try:
                self.execute(code, file)
            except BaseException as error:  # whatever it raises, the session goes on
                output.write(describe(error))
        return output.value()

    def execute(self, code: str, file: str) -> None:
        """Runs the code, and prints the value of an expression at its end."""
        tree = ast.parse(code, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file, "exec"), self.names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), self.names)
            if value is not None:
                print(repr(value))


def describe(error: BaseException) -> str:
    """Returns the traceback, from the first line of the code on."""
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list([f for f in report.stack if f.filename.startswith("<call")])
    return "".join(report.format())


def receive() -> bytes:
    size = struct.unpack("=I", read_exactly(4))[0]
    return read_exactly(size)


def read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(CHANNEL, size - len(data))
        if not part:
            os._exit(0)  # the caller is gone
        data += part
    return data


def send(text: str) -> None:
    data = text.encode(errors="replace")
    message = struct.pack("=I", len(data)) + data
    while message:
        message = message[os.write(CHANNEL, message) :]


def main() -> None:
    session, limit = Session(), int(receive())
    while True:
        send(session.run(receive().decode(), limit))


if __name__ == "__main__":
    main()
