"""Plays an episode of tools alone: the model asks for calls, gets their results, and answers in the end."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from rlsys.episodes.ask import Ask, Message, Reply, ToolCall
from rlsys.episodes.tools.tool import MAX_CHARS, TIMEOUT_S, Tool, call_tool


async def play(
    row: dict[str, Any],
    ask: Ask,
    *,
    tools: Sequence[Tool],
    on_bad_call: Literal["observe", "end"] = "observe",  # a call that cannot be read or made
    timeout_s: float = TIMEOUT_S,  # for all calls of a reply
    max_chars: int = MAX_CHARS,
) -> None:
    """Asks until a reply has no calls. Reward functions score the episode."""
    by_name = {tool.name: tool for tool in tools}
    reply = await ask(row["prompt"])
    while reply.calls and (on_bad_call == "observe" or not has_bad_call(reply)):
        results: list[Message] = []
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        for call in reply.calls:
            left_s = max(end - clock(), 0.0)
            text = call.error or await call_tool(by_name[call.name], call.arguments, left_s, max_chars)
            results.append(result_message(call, text))
        reply = await ask(results)


def has_bad_call(reply: Reply) -> bool:
    return any(call.error for call in reply.calls)


def result_message(call: ToolCall, text: str) -> Message:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
