"""What a tool is, and how it is called: within its time, and its output within a limit."""

import asyncio
from typing import Any, Protocol

from rlsys.sandbox import SandboxError

Schema = dict[str, Any]
TIMEOUT_S = 30.0
MAX_CHARS = 8000


class ToolServerError(ConnectionError):
    """A server of tools does not start or has ended. The model cannot correct it: the episode fails."""


class Tool(Protocol):
    """A tool of one episode. Its schema is what the chat template shows to the model."""

    name: str
    schema: Schema  # {"type": "function", "function": {"name": …, "description": …, "parameters": …}}

    async def call(self, arguments: dict[str, Any]) -> str:
        """Returns what the model sees. An exception is seen by the model too, unless it is the fault of this host."""
        ...

    async def close(self) -> None: ...


async def call_tool(
    tool: Tool, arguments: dict[str, Any], timeout_s: float = TIMEOUT_S, max_chars: int = MAX_CHARS
) -> str:
    """Calls a tool, and returns its output or its error as the model sees them."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            text = await tool.call(arguments)
    except (SandboxError, ToolServerError):
        raise  # this host's fault, which the model cannot correct
    except Exception as error:  # a tool may raise anything
        text = f"Error: {type(error).__name__}: {error}"
        if deadline.expired():
            text = f"Error: `{tool.name}` gave no result within {timeout_s:.3g} s."
    return cut_middle(text, max_chars)


def cut_middle(text: str, max_chars: int) -> str:
    """Leaves out the middle of a text that is too long, and says so."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    return f"{text[:head]}\n[… {len(text) - max_chars:,} characters left out …]\n{text[len(text) - max_chars + head :]}"
