"""vLLM's AsyncLLM, for GPUs and tensor parallelism."""

import asyncio
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar

from rlsys.types import Request
from workers.rollout.engine import PREFIX_CACHE_NOT_RESET
from workers.rollout.stops_in_blocks import StopsInBlocks
from workers.rollout.vllm_requests import Stops, collect_outputs, request_id, sampling_params, token_prompt

T = TypeVar("T")
CORE_DEATH_TIMEOUT_S = (
    3.0  # if one of its processes has died, and raised an error, the engine's core dies within this time
)


class AsyncEngine:
    """The engine's core runs in a child process, with tensor parallelism in a further process for each device."""

    def __init__(self, settings: dict[str, Any]):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self.running_ids: set[str] = set()
        self.sleeping_parts: set[str] = set()
        gc.collect()
        gc.freeze()  # a full collection would look at all that was imported: half a second, while the core waits

    @cached_property
    def stops_in_blocks(self) -> StopsInBlocks:
        return StopsInBlocks(self.engine.output_processor)

    async def answer_or_exit(self, answer: Awaitable[T]) -> T:
        """Returns the core's answer. If the core has died, ends the actor, so that the driver replaces it."""
        try:
            return await answer
        except Exception:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CORE_DEATH_TIMEOUT_S):
                    while not self.engine.errored:
                        await asyncio.sleep(0.1)
            if not self.engine.errored:
                raise
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    async def generate(self, requests: list[Request], stops: Stops) -> AsyncIterator[list[Any]]:
        finished: asyncio.Queue[Any] = asyncio.Queue()

        async def stream(r: Request) -> None:
            prompt, params = token_prompt(r), sampling_params(r, self.stops_in_blocks.watch(r, stops))
            async for output in self.engine.generate(prompt, params, request_id=request_id(r)):
                if output.finished:
                    finished.put_nowait(output)

        async def run(r: Request) -> None:
            try:
                await self.answer_or_exit(stream(r))
            except Exception as error:
                finished.put_nowait(error)
            finally:
                self.running_ids.discard(request_id(r))
                self.stops_in_blocks.forget(r)

        self.running_ids.update(map(request_id, requests))
        tasks = [asyncio.ensure_future(run(r)) for r in requests]
        try:
            async for outputs in collect_outputs(finished, len(requests)):
                yield outputs
        finally:
            for task in tasks:
                task.cancel()

    async def abort_all(self) -> None:
        await self.answer_or_exit(self.engine.abort(list(self.running_ids)))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        await self.answer_or_exit(self.engine.pause_generation(mode="keep", clear_cache=False))
        try:
            yield
        finally:
            await self.answer_or_exit(self.engine.resume_generation())

    async def set_weight_version(self, version: int) -> None:
        if hasattr(self.engine, "update_weight_version"):  # since vLLM 0.32
            await self.answer_or_exit(self.engine.update_weight_version(str(version)))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return list(await self.answer_or_exit(self.engine.collective_rpc(method, kwargs=arguments)))

    async def inspect(self, method: str) -> list[Any]:
        return await self.call_workers(method)

    async def reset_prefix_cache(self) -> None:
        if not await self.answer_or_exit(self.engine.reset_prefix_cache()):
            raise RuntimeError(PREFIX_CACHE_NOT_RESET)

    async def sleep(self) -> None:
        await self.answer_or_exit(self.engine.sleep(level=2))  # drops the weights: the next sync sends them again
        self.sleeping_parts = {"weights", "kv_cache"}

    async def wake(self, part: str) -> None:
        if part in self.sleeping_parts:  # for an engine that is awake, vLLM would end a pause
            self.sleeping_parts.discard(part)
            await self.answer_or_exit(self.engine.wake_up(tags=[part]))
