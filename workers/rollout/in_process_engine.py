"""vLLM's synchronous engine inside the actor, for CPU."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rlsys.types import Request
from workers.cpu.compiling import allow_compiling
from workers.rollout.architecture import register_architecture
from workers.rollout.engine import PREFIX_CACHE_NOT_RESET
from workers.rollout.vllm_requests import Stops, collect_outputs, request_id, sampling_params, token_prompt


class InProcessEngine:
    """One task steps the engine on the actor's event loop, for all callers of `generate` together."""

    def __init__(self, settings: dict[str, Any], exact: bool = False):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if exact:
            from workers.cpu.exact_engine import use_exact_attention

            use_exact_attention()
        else:
            from workers.cpu.norms import register_kernels

            register_kernels()
        if not settings["enforce_eager"]:
            allow_compiling("rollout.enforce_eager false", "rollout.enforce_eager true")
        register_architecture(settings["model"], settings["trust_remote_code"])
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings), enable_multiprocessing=False)
        self.queue_by_request: dict[str, asyncio.Queue[Any]] = {}  # by request id: the caller's queue
        self.lock = asyncio.Lock()  # held while the engine is stepped or its weights change
        self.step_task: asyncio.Task[None] | None = None

    async def generate(self, requests: list[Request], stops: Stops) -> AsyncIterator[list[Any]]:
        finished: asyncio.Queue[Any] = asyncio.Queue()
        try:
            for r in requests:
                self.engine.add_request(request_id(r), token_prompt(r), sampling_params(r, stops))
                self.queue_by_request[request_id(r)] = finished
            if not self.step_task or self.step_task.done():
                self.step_task = asyncio.ensure_future(self.step_until_done())
            async for outputs in collect_outputs(finished, len(requests)):
                yield outputs
        finally:
            # By now another call may be sampling the same requests again: only those of this call are aborted.
            ids = [request_id(r) for r in requests if self.queue_by_request.get(request_id(r)) is finished]
            for i in ids:
                del self.queue_by_request[i]
            self.engine.abort_request(ids)

    async def step_until_done(self) -> None:
        try:
            while self.engine.has_unfinished_requests():
                async with self.lock:
                    outputs = self.engine.step()
                for output in outputs:
                    if output.finished:
                        self.queue_by_request.pop(output.request_id).put_nowait(output)
                await asyncio.sleep(0)  # so that callers, and other calls to the actor, can run
        except Exception as error:
            for finished in set(self.queue_by_request.values()):
                finished.put_nowait(error)

    async def abort_all(self) -> None:
        from vllm.v1.engine import FinishReason

        processor = self.engine.output_processor
        for request, finished in self.queue_by_request.items():
            [internal_id] = processor.external_req_ids[request]
            state = processor.request_states[internal_id]
            finished.put_nowait(state.make_request_output([], None, FinishReason.ABORT, None))
        self.engine.abort_request(list(self.queue_by_request))
        self.queue_by_request.clear()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        core = self.engine.engine_core.engine_core
        async with self.lock:
            core.pause_scheduler("keep", clear_cache=False)
            try:
                yield
            finally:
                core.resume_scheduler()

    async def set_weight_version(self, version: int) -> None:
        if hasattr(self.engine, "set_weight_version"):  # since vLLM 0.32
            self.engine.set_weight_version(str(version))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return list(self.engine.collective_rpc(method, kwargs=arguments))

    async def inspect(self, method: str) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self.engine.collective_rpc(method)))

    async def reset_prefix_cache(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise RuntimeError(PREFIX_CACHE_NOT_RESET)

    async def sleep(self) -> None:
        """Does nothing: a CPU engine shares no GPU memory."""

    async def wake(self, part: str) -> None:
        """Does nothing, as `sleep`."""
