"""A Python function of the user's as a tool."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

from rlsys.episodes.tools.schema import GIVEN, Schema, function_schema


class FunctionTool:
    """Calls a function, in a thread if it is not async. It gets `row` and `state` if it has parameters of these names.

    `state` is a dict that lives as long as the episode, and is shared by its tools.
    """

    def __init__(self, function: Callable[..., Any], row: dict[str, Any], state: dict[str, Any]):
        self.function = function
        self.schema: Schema = function_schema(function)
        self.name: str = self.schema["function"]["name"]
        wanted = inspect.signature(function).parameters
        self.given = {name: value for name, value in zip(GIVEN, (row, state), strict=True) if name in wanted}

    async def call(self, arguments: dict[str, Any]) -> str:
        if inspect.iscoroutinefunction(self.function):
            return as_text(await self.function(**arguments, **self.given))
        return as_text(await asyncio.to_thread(self.function, **arguments, **self.given))

    async def close(self) -> None:
        pass


def as_text(result: Any) -> str:
    """Returns a text as it is, and any other result as JSON if it can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
