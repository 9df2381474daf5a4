"""A Python function of the user's as a tool."""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from threading import Thread
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
        call = partial(self.function, **arguments, **self.given)
        try:
            result = call() if inspect.iscoroutinefunction(self.function) else await run_in_thread(call)
            return as_text(await result if inspect.isawaitable(result) else result)
        except (SystemExit, KeyboardInterrupt) as error:  # of an async function
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        pass


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread of its own: one that hangs blocks neither others nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:  # it belongs to whoever waits
            error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:  # such as sys.exit, which ends no more than the call
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=run, daemon=True).start()
    return await future


def as_text(result: Any) -> str:
    """Returns a text as it is, and any other result as JSON if it can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
