"""From the option `episode.tools` to the tools of an episode.

python                                   the sandbox's Python
my_tools.py:search                       a function of the user's
mcp: {command: [python, -m, my_server]}  the tools of a server
"""

from collections.abc import Sequence
from typing import Any

from rlsys.config.plugins import is_importable, load_function, user_function_problems
from rlsys.episodes.tools.function_tool import FunctionTool
from rlsys.episodes.tools.mcp_tool import McpServer, McpTool, read_spec
from rlsys.episodes.tools.python_tool import PythonTool
from rlsys.episodes.tools.tool import Schema, Tool
from rlsys.errors import ConfigError

BUILT_IN = {"python": PythonTool}
Spec = str | dict[str, Any]


class Toolbox:
    """The tools of a process. Each episode opens its own: they hold what the model has done with them."""

    def __init__(self, specs: Sequence[Spec]):
        self.specs = list(specs)
        self.servers = {n: McpServer(read_spec(spec["mcp"])) for n, spec in enumerate(specs) if isinstance(spec, dict)}

    async def open(self, row: dict[str, Any]) -> list[Tool]:
        state: dict[str, Any] = {}
        tools: list[Tool] = []
        try:
            for number, spec in enumerate(self.specs):
                tools += await self._open(number, spec, row, state)
            require_different_names(tools)
        except BaseException:
            await close_all(tools)
            raise
        return tools

    async def schemas(self) -> list[Schema]:
        """Returns what the chat template shows of the tools, the same in all episodes."""
        tools = await self.open({})
        await close_all(tools)
        return [tool.schema for tool in tools]

    async def _open(self, number: int, spec: Spec, row: dict[str, Any], state: dict[str, Any]) -> Sequence[Tool]:
        if isinstance(spec, str):
            if spec in BUILT_IN:
                return [BUILT_IN[spec]()]
            return [FunctionTool(load_function(spec, BUILT_IN, "episode.tools"), row, state)]
        server = self.servers[number]
        if server.spec.per_episode:
            server = McpServer(server.spec)
        return [McpTool(server, described) for described in await server.list_tools()]

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()


async def close_all(tools: Sequence[Tool]) -> None:
    for tool in tools:
        await tool.close()


def require_different_names(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"episode.tools: two tools have the name `{name}`. Rename one, or leave one out.")


def tool_problems(specs: Sequence[Any]) -> list[str]:
    """Returns what is wrong with the option `episode.tools`, without running any of the user's code."""
    problems = []
    for spec in specs:
        if isinstance(spec, dict) and set(spec) == {"mcp"}:
            try:
                read_spec(spec["mcp"])
            except ConfigError as error:
                problems.append(str(error))
            if not is_importable("mcp"):
                problems.append("episode.tools: MCP servers need the package mcp: pip install 'rlsys[mcp]'.")
        elif not isinstance(spec, str) or (spec not in BUILT_IN and ":" not in spec):
            problems.append(
                f"episode.tools: {spec!r} is no tool. Give python, path/to/file.py:function, module:function or "
                "{mcp: {command: […]}}."
            )
        else:
            problems += user_function_problems("episode.tools", spec)
    return problems
