"""The sandbox's Python as a tool. Variables stay from call to call, until the episode ends."""

import asyncio
import signal
import socket
import struct
import subprocess
from functools import cache
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import Any

from rlsys.episodes.tools.tool import MAX_CHARS, Schema
from rlsys.sandbox import ProgramResult, SandboxError, run_program

SCRIPT = Path(__file__).with_name("python_session.py")
SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code and returns what it prints, and the value of its last line. "
        "Variables stay for later calls. Only the standard library is there, and no network.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code to run"}},
            "required": ["code"],
        },
    },
}
LIFETIME_S = 86_400.0  # of a session; a call has the time of tools
ENDED = "Error: the Python process ended ({}). The next call starts a new one, without the variables of this one."


class PythonTool:
    """A session in the sandbox, which starts with the first call."""

    name = "python"
    schema = SCHEMA

    def __init__(self, memory_mb: int = 512, max_chars: int = MAX_CHARS):
        self.memory_mb, self.max_chars = memory_mb, max_chars
        self.session: PythonSession | None = None

    async def call(self, arguments: dict[str, Any]) -> str:
        if self.session is None:
            self.session = PythonSession(self.memory_mb, self.max_chars)
        session = self.session
        try:
            return await session.run(arguments["code"])
        except ConnectionError:
            self.session = None
            return ENDED.format(await session.end())
        except BaseException:  # the time is over: nobody knows what state the session is in
            self.session = None
            await asyncio.shield(session.end())
            raise

    async def close(self) -> None:
        if self.session:
            await self.session.end()
            self.session = None


class PythonSession:
    """A program in the sandbox at the other end of a socket. A thread waits for its end."""

    def __init__(self, memory_mb: int, max_chars: int):
        self.memory_mb, self.max_chars = memory_mb, max_chars
        self.socket, self.other_end = socket.socketpair()
        self.socket.setblocking(False)
        self.guard: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.result: ProgramResult | SandboxError | OSError | None = None
        self.thread = Thread(target=self._run_program, daemon=True)
        self.thread.start()
        self.is_new = True

    def _run_program(self) -> None:
        try:
            self.result = run_program(
                compile_script(),
                channel=self.other_end.detach(),
                wall_s=LIFETIME_S,
                cpu_s=LIFETIME_S,
                memory_mb=self.memory_mb,
                on_start=self._keep_guard,
            )
        except (SandboxError, OSError) as error:
            self.result = error

    def _keep_guard(self, guard: "subprocess.Popen[bytes]") -> None:
        self.guard = guard
        if self.stopped:
            guard.send_signal(signal.SIGTERM)

    async def run(self, code: str) -> str:
        """Raises `ConnectionError` if the program has ended."""
        if self.is_new:
            await self._send(str(self.max_chars))
            self.is_new = False
        await self._send(code)
        [size] = struct.unpack("=I", await self._receive(4))
        if size > 8 * self.max_chars + 200:  # not the script's: the code has written to the socket
            raise ConnectionError
        return (await self._receive(size)).decode(errors="replace")

    async def _send(self, text: str) -> None:
        data = text.encode(errors="replace")
        await asyncio.get_running_loop().sock_sendall(self.socket, struct.pack("=I", len(data)) + data)

    async def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self.socket, size - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data

    async def end(self) -> str:
        """Ends the program, and says how it had ended before."""
        self.stopped = True
        self.socket.close()
        if self.guard and self.thread.is_alive():
            await asyncio.to_thread(self.thread.join, 0.2)  # it may be about to end by itself
            if self.thread.is_alive():
                self.guard.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.thread.join)
        if isinstance(self.result, SandboxError | OSError):
            raise SandboxError(str(self.result))
        return self.result.reason or "exit" if self.result else ""


@cache
def compile_script() -> CodeType:
    return compile(SCRIPT.read_bytes(), SCRIPT.name, "exec")
