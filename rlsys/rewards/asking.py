"""How a reward function asks a frozen engine, one of `models`. Both ends of the conversation.

    reward function                                      engine (workers/frozen/engine.py)
     │ await ask("judge", prompt)                         │ listens, and writes host, port and secret to its address file
     │  {"secret", "prompt", "max_tokens", "temperature", "seed"}
     │ ──────────────────────────────────────────────────▶│ one JSON line each, a connection for each question
     │ ◀──────────────────────────────────────────────────│
     │  {"text": …}   or   {"error": sentence}

An engine that was lost is replaced, and its address file with it. Meanwhile questions wait, go to another engine of the
model if there is one, and are asked again. While no engine can be reached, a function's deadline does not pass.
The same question has the same answer: it is greedy, or sampled with a seed that follows from the prompt.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGS = "RLSYS_LOGS"  # environment variable of all workers: the folder with the address files
RETRY_S = 0.2  # between two looks for an engine
MAX_LINE = 64 << 20  # bytes
BACKLOG = 4096  # connections that wait while the engine computes a step
Prompt = str | list[dict[str, Any]]  # a text as it is, or a chat, which gets the model's template
Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

# Starts the deadline of the running reward function again. Who runs functions sets it.
restart_deadline: ContextVar[Callable[[], None]] = ContextVar("restart_deadline", default=lambda: None)


class ModelError(RuntimeError):
    """An engine refused a question."""


def engine_name(model: str, index: int) -> str:
    return f"model-{model}-{index}"


# --- the reward function's end ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """What a function gets as its argument `ask`. `await ask("judge", "Is 7 prime? Answer yes or no:", max_tokens=4)`"""

    engines: dict[str, int]  # by model, how many answer

    async def __call__(
        self,
        model: str,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """Returns the model's answer, at most `max_tokens` long. Another `seed` samples another one."""
        if model not in self.engines:
            raise ModelError(f"ask: there is no model `{model}`; `models` has {', '.join(self.engines) or 'none'}.")
        folder = os.environ.get(LOGS)
        if folder is None:
            raise ModelError(
                f"ask: the engines of `{model}` run in `rlsys train` and `rlsys eval` only, and are found in the run "
                "directory, which every host with reward workers must see."
            )
        digest = int(hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:8], 16)
        seed = digest if seed is None else seed
        question = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        count = self.engines[model]
        order = [
            (digest + i) % count for i in range(count)
        ]  # equal prompts go to the same engine, which has them cached
        files = [Path(folder) / f"{engine_name(model, i)}.address" for i in order]
        while True:
            for file in files:
                with contextlib.suppress(OSError, EOFError, ValueError):  # not there, dead, or died meanwhile
                    reply = await ask_engine(file, question)
                    if "error" in reply:
                        raise ModelError(f"{model}: {reply['error']}")
                    return str(reply["text"])
            restart_deadline.get()()
            await asyncio.sleep(RETRY_S)


async def ask_engine(file: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Asks one engine once. Raises `OSError`, `EOFError` or `ValueError` if it does not answer."""
    address = json.loads(file.read_text())
    reader, writer = await asyncio.open_connection(address["host"], address["port"], limit=MAX_LINE)
    try:
        writer.write(json.dumps(question | {"secret": address["secret"]}).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise EOFError
    reply: dict[str, Any] = json.loads(line)
    return reply


# --- the engine's end ------------------------------------------------------------------------------------------------


async def serve(host: str, file: Path, answer: Answer) -> asyncio.Server:
    """Answers questions from now on, and writes where to the address file."""
    secret = secrets.token_hex()

    async def on_question(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            question = json.loads(await reader.readline() or "{}")
            if not hmac.compare_digest(str(question.pop("secret", "")), secret):
                return
            gone = asyncio.ensure_future(reader.read(1))  # the function's process was killed, or its call cancelled
            reply = asyncio.ensure_future(answer(question))
            await asyncio.wait({gone, reply}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not reply.done():
                reply.cancel()
                return
            try:
                message = reply.result()
            except Exception as error:
                message = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()

    server = await asyncio.start_server(on_question, host, 0, limit=MAX_LINE, backlog=BACKLOG)
    address = {"host": host, "port": server.sockets[0].getsockname()[1], "secret": secret}
    unfinished = file.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(address, out)
    unfinished.rename(file)
    return server
