"""Tools of MCP servers, over standard input and output or HTTP, by the official client (extra `mcp`).

A server is started or connected with the first episode of a process, and serves all its episodes. With `per_episode`,
each episode has its own. When a server dies or is ended, the calls that it was working on are made once more, on a new
one: one episode's hung call must not be seen in another's conversation. If that fails too, the episode fails.
"""

import asyncio
import contextlib
import json
import os
import tempfile
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from rlsys.config.plugins import PROCESS_MARK
from rlsys.episodes.tools.tool import Schema, ToolServerError
from rlsys.errors import ConfigError

START_S = 60.0
ANSWER_S = 5.0
INHERITED = (PROCESS_MARK, "PYTHONHASHSEED")  # besides what the client library passes on, such as PATH


@dataclass(frozen=True)
class McpSpec:
    """Where a server is. McpSpec(command=["python", "-m", "my_server"]), or McpSpec(url="http://127.0.0.1:8000/mcp")"""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    per_episode: bool = False

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class ServerEnded(Exception):
    """The server of a call has ended."""


class McpServer:
    """A connection to a server. One task opens and closes it, as the client library demands."""

    def __init__(self, spec: McpSpec):
        self.spec = spec
        self.lock = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        self.client: Any = None
        self.closing = asyncio.Event()
        self.described: list[Any] = []  # its tools: they are fixed at the start
        self.check: asyncio.Task[None] | None = None  # whether the server still answers

    async def connect(self) -> Any:
        """Returns the client, connected. Raises `ToolServerError` with what the server has written."""
        async with self.lock:
            if self.client is None:
                self.closing = asyncio.Event()
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                # In a context of its own: it is no task of the episode that happens to start it.
                self.task = asyncio.create_task(self._serve(ready, self.closing), context=Context())
                try:
                    self.client = await asyncio.wait_for(ready, START_S)
                except TimeoutError:
                    await self.close()
                    raise ToolServerError(f"no MCP server at {self.spec}: no answer within {START_S:g} s") from None
                except BaseException:
                    await self.close()
                    raise
            return self.client

    async def _serve(self, ready: "asyncio.Future[Any]", closing: asyncio.Event) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with Client(self._transport(log)) as client:
                    ready.set_result(client)
                    await closing.wait()
            except Exception as error:  # it may fail in any way, also while it closes
                if not ready.done():
                    ready.set_exception(ToolServerError(f"no MCP server at {self.spec}: {explain(error, log)}"))

    def _transport(self, log: Any) -> Any:
        if self.spec.url:
            return self.spec.url
        from mcp import StdioServerParameters, stdio_client

        command, *arguments = self.spec.command
        env = {name: os.environ[name] for name in INHERITED if name in os.environ} | self.spec.env
        return stdio_client(StdioServerParameters(command=command, args=arguments, env=env), errlog=log)

    async def list_tools(self) -> list[Any]:
        if self.described:
            return self.described
        client = await self.connect()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                self.described = tools
                return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = await self.call_once(name, arguments)
        except ServerEnded:
            try:
                result = await self.call_once(name, arguments)
            except ServerEnded as error:
                sentence = f"the MCP server {self.spec} ended during `{name}`, and a new one did too: {error}"
                raise ToolServerError(sentence) from None
        text = "\n".join(block_text(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return f"Error: {text}" if result.is_error else text

    async def call_once(self, name: str, arguments: dict[str, Any]) -> Any:
        client = await self.connect()
        try:
            return await client.call_tool(name, arguments)
        except Exception as error:
            if client is self.client and await self.answers(client):
                raise
            if client is self.client:  # else another call has closed it
                await self.close()
            raise ServerEnded(str(error)) from None
        except asyncio.CancelledError:  # the call's time is over
            self.check = asyncio.create_task(self.close_if_silent(client))
            raise

    async def answers(self, client: Any) -> bool:
        """Returns whether the server still answers. If so, only the call has failed."""
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), ANSWER_S)
        except Exception:  # any error means no
            return False
        return True

    async def close_if_silent(self, client: Any) -> None:
        """Ends a server that answers nothing any more, for example because it writes an endless result."""
        if not await self.answers(client) and client is self.client:
            await self.close()

    async def close(self) -> None:
        self.closing.set()
        task, client, self.task, self.client = self.task, self.client, None, None
        if task:
            if client is None:
                task.cancel()  # it is still connecting
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await task


class McpTool:
    """A tool of a server."""

    def __init__(self, server: McpServer, described: Any):
        self.server = server
        self.name: str = described.name
        function = {
            "name": described.name,
            "description": described.description or "",
            "parameters": described.input_schema,
        }
        self.schema: Schema = {"type": "function", "function": function}

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self.server.call(self.name, arguments)

    async def close(self) -> None:
        if self.server.spec.per_episode:
            await self.server.close()


def block_text(block: Any) -> str:
    """Returns a text, the text of an embedded file, or the name of what is no text."""
    if block.type == "resource_link":
        return f"[{block.type} {block.uri}]"
    text = getattr(block.resource if block.type == "resource" else block, "text", None)  # a file may be binary
    return f"[{block.type}]" if text is None else str(text)


def explain(error: BaseException, log: Any) -> str:
    """Returns the cause, and the last line that the server wrote to its standard error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    log.seek(0)
    lines = log.read()[-2000:].strip().splitlines()
    return f"{type(error).__name__}: {error}" + (f" ({lines[-1]})" if lines else "")


def read_spec(spec: Any) -> McpSpec:
    """Reads `{command: [...], env: {...}}` or `{url: http://…}`."""
    if not is_spec(spec):
        raise ConfigError(
            "episode.tools: an MCP server is {mcp: {command: [python, -m, my_server], env: {…}}} or "
            f"{{mcp: {{url: http://…}}}}, with per_episode: true if each episode needs its own; this is {spec!r}."
        )
    return McpSpec(**spec)


def is_spec(spec: Any) -> bool:
    if not isinstance(spec, dict) or not set(spec) <= set(McpSpec.__dataclass_fields__):
        return False
    command, url = spec.get("command", []), spec.get("url", "")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command) or not isinstance(url, str):
        return False
    return bool(command) != bool(url)
