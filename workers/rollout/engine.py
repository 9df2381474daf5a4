"""What a rollout worker needs of vLLM. Two classes implement it.

`InProcessEngine`, on CPU, steps vLLM inside the actor: no child process, no compilation unless asked for, and a much
shorter start. `AsyncEngine`, on GPUs and with tensor parallelism, is vLLM's AsyncLLM: it reports a dead engine core at
once, where the synchronous engine would never end.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from rlsys.types import Request
from workers.rollout.vllm_requests import Stops

PREFIX_CACHE_NOT_RESET = "vLLM did not reset its prefix cache: requests are still running"


class Engine(Protocol):
    def generate(self, requests: list[Request], stops: Stops) -> AsyncIterator[list[Any]]:
        """Yields vLLM's outputs as they finish. Several callers may generate at once."""
        ...

    async def abort_all(self) -> None:
        """Ends all requests. Unfinished outputs are yielded with finish_reason abort."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """While it is open, no token is sampled and the weights may change.

        Afterwards samples go on where they were.
        """
        ...

    async def set_weight_version(self, version: int) -> None:
        """Sets the version that vLLM reports in `weight_versions` for the tokens to come."""
        ...

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method of vLLM's worker on every device of the engine."""
        ...

    async def inspect(self, method: str) -> list[Any]:
        """Calls a method that changes nothing. Tokens may be sampled at the same time."""
        ...

    async def reset_prefix_cache(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self, part: str) -> None: ...
