"""Plays an episode by a program of the user's, which asks the model at a web address and knows nothing of training.

The program runs in the directory of the run. It finds the model's address and key in its environment, and a folder of its own in
`RLSYS_FOLDER`, which is deleted when the episode ends. All that it has started ends with it.
"""

import asyncio
import inspect
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlsys.config.plugins import load_function
from rlsys.episodes.ask import Message
from rlsys.episodes.session import Session
from rlsys.errors import ConfigError
from rlsys.sandbox import kill_marked

KEPT = 64 << 10  # bytes at the end of what a program prints
MARK = "RLSYS_PROGRAM"  # in the environment of a program, and of all that it starts
LAST_WORDS_S = 1.0  # for what is printed to arrive, when all has ended
SHOWN = 500  # characters of its last words, in an error


@dataclass(frozen=True)
class Ended:
    """What a grading function gets: `grade(row, program)` returns a score, or what reward functions return."""

    exit_code: int  # negative: the signal that ended it
    output: str  # the end of what it has printed
    folder: Path  # that was its own, for files that it has left
    messages: list[Message]  # the transcript


async def play(row: dict[str, Any], session: Session, *, command: str, grade: Callable[..., Any] | None = None) -> Any:
    with tempfile.TemporaryDirectory(prefix="rlsys-program-") as folder:
        words = [fill(word, row) for word in shlex.split(command)]
        exit_code, output = await run_program(words, row, session, folder)
        failed = exit_code and not grade and not session.over  # at a limit its client has got an error
        if failed or not session.asked:
            unasked = "" if session.asked else ", and never asked the model"
            last = output[-SHOWN:].strip() or "none"
            raise RuntimeError(f"{words[0]} ended with {describe(exit_code)}{unasked}. Its last words: {last}")
        return grade and await score(grade, row, Ended(exit_code, output, Path(folder), session.messages))


async def run_program(words: list[str], row: dict[str, Any], session: Session, folder: str) -> tuple[int, str]:
    """Returns how the program ended, and the end of what it printed."""
    mark = secrets.token_hex(16)
    own = {"RLSYS_FOLDER": folder, "TMPDIR": folder, MARK: mark, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    Path(folder, "row.json").write_text(json.dumps(row, default=str))
    printed = bytearray()
    async with collecting(printed) as output:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=os.environ | session.variables | own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            exit_code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(kill_marked, f"{MARK}={mark}".encode())
    return exit_code, printed.decode(errors="replace")


@asynccontextmanager
async def collecting(printed: bytearray) -> AsyncIterator[BinaryIO]:
    """Gives a file to print to, and collects the end of what is printed. asyncio's own would wait for all who have the file."""
    source, target = os.pipe()
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(source, "rb", 0))
    reading = asyncio.ensure_future(keep_end(stream, printed))
    try:
        with os.fdopen(target, "wb", 0) as file:
            yield file
        await asyncio.wait([reading], timeout=LAST_WORDS_S)
    finally:
        reading.cancel()
        transport.close()


async def keep_end(stream: Any, printed: bytearray) -> None:
    """Reads all that is printed, and keeps its end."""
    while data := await stream.read(KEPT):
        printed += data
        del printed[:-KEPT]


def fill(word: str, row: dict[str, Any]) -> str:
    """Replaces {column} by what the row has there. `fill("--task={task}", {"task": "2+2"})` is one word, whatever the row holds."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in row:
            raise ValueError(f"episode.command: the row has no `{name}`. It has {', '.join(row)}.")
        return text_of(row[name])

    return re.sub(r"\{(\w+)\}", value, word)


def text_of(value: Any) -> str:
    """Reads a prompt: that of a single message is its text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and "content" in value[0]:
        return str(value[0]["content"])
    return json.dumps(value, default=str)


async def score(grade: Callable[..., Any], row: dict[str, Any], ended: Ended) -> Any:
    if inspect.iscoroutinefunction(grade):
        return await grade(row, ended)
    return await asyncio.to_thread(grade, row, ended)


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Loads the grading function. Raises `ConfigError` if there is none, or no such program."""
    command, grade = str(options.get("command", "")), options.get("grade")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"episode.command: `{command}` cannot be split into words: {error}.") from None
    if not words:
        raise ConfigError("episode.command is missing: the program that plays, such as python agent.py {task}.")
    if "{" not in words[0] and not shutil.which(words[0]):
        raise ConfigError(f"episode.command: there is no program `{words[0]}` in {Path.cwd()} or on PATH.")
    return options | {"grade": load_function(grade, {}, "episode.grade") if grade else None}


def describe(exit_code: int) -> str:
    with suppress(ValueError):
        return f"exit code {exit_code}" if exit_code > 0 else signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
