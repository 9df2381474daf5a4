"""vLLM behind a few verbs: generate, cut, pause, call, restart its caches. Two classes drive it.

On CPU the engine runs inside the actor: no further process, no compilation unless asked for, and a much shorter start. On GPUs, and
with tensor parallelism, it is vLLM's AsyncLLM, which reports a dead engine core at once instead of waiting for ever.
"""

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from rlsys.config.derived import DEFAULT_BATCHED_TOKENS, max_batched_tokens
from rlsys.config.schema import Config
from rlsys.types import Request
from workers.cpu import compiling

T = TypeVar("T")
MAX_BATCHING_DELAY_S = 0.25  # that a finished sample waits for others to leave with: a list takes engine, driver and rewards some milliseconds
PREFIX_CACHE_NOT_RESET = "vLLM did not reset its prefix cache: requests are still running"
CORE_DEATH_TIMEOUT_S = 3.0  # what a process of an engine may take to die of another's death, which is told first

# An engine with all its processes is on one node: they talk to each other there and nowhere else.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
COMMON_ENVIRONMENT = LOOPBACK | {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # between the processes of an engine: an answer keeps its type
}
# Set before vLLM is imported, in the actor's runtime environment.
CPU_ENVIRONMENT = COMMON_ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # on CPU vLLM cannot load what it saved so, and compiles anew; torch's own cache serves
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # with several threads how a sequence is cut would depend on those beside it
    "OMP_NUM_THREADS": "1",
}
GPU_ENVIRONMENT = COMMON_ENVIRONMENT | {
    "TRITON_F32_DEFAULT": "ieee",  # float32 as the policy computes it: vLLM's attention would round its factors to TF32
}


class Engine(Protocol):
    def generate(self, requests: list[Request], stop_ids: list[int], salt: str = "") -> AsyncIterator[list[Any]]:
        """vLLM's finished outputs, as they finish. Several callers may generate at once.

        Only requests of the same `salt` share what was computed for a prompt that they begin with.
        """
        ...

    async def stop_early(self) -> None:
        """Ends all requests: what is half-written is handed out, with finish_reason abort."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """In between, no token is sampled and the weights may change; then samples go on where they were."""
        ...

    async def set_weight_version(self, version: int) -> None:
        """What vLLM says in `weight_versions` of the tokens to come."""
        ...

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """A method of vLLM's worker, on every worker of the engine."""
        ...

    async def inspect(self, method: str) -> list[Any]:
        """A method of vLLM's worker that changes nothing. Tokens may be sampled at the same time."""
        ...

    async def reset_prefix_cache(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self, part: str) -> None: ...


def engine_arguments(config: Config, model: str, backend: str, longest_prompt: int) -> dict[str, Any]:
    """What vLLM's engine is built from."""
    r = config.rollout
    found: dict[str, Any] = {
        "model": model,
        "tokenizer": model,
        "skip_tokenizer_init": True,
        "dtype": r.dtype,
        "max_model_len": longest_prompt + r.max_new_tokens,
        "max_num_seqs": r.max_sequences,
        "tensor_parallel_size": r.tensor_parallel,
        "block_size": r.block_size,
        "enable_prefix_caching": True,
        "enforce_eager": r.enforce_eager,
        "seed": config.run.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "generation_config": "vllm",  # sampling defaults of the model's authors would go unseen by the trainer
        "logprobs_mode": "processed_logprobs",  # after temperature
        "disable_log_stats": True,
        "worker_extension_cls": "workers.rollout.vllm_extension.WorkerExtension",
        "weight_transfer_config": {"backend": backend},
    }
    if r.max_sequences > DEFAULT_BATCHED_TOKENS:
        # vLLM would not take so many sequences for its own choice of tokens.
        found["max_num_batched_tokens"] = max_batched_tokens(config, found["max_model_len"])
    if r.tensor_parallel > 1:
        # In a placement group vLLM would ask Ray for the engine's processes, and for GPUs that the engine's actor has already.
        found["distributed_executor_backend"] = "mp"
    if config.cluster.device == "cpu":
        # A prompt in two parts would rewind its random numbers, which vLLM's CPU build cannot.
        found |= {
            "kv_cache_memory_bytes": r.kv_cache_mb << 20,
            "enable_chunked_prefill": False,
        }
        from workers.cpu.norms import KERNEL_CONFIG

        # Compiled, norms become one with what is around them.
        own_norms = r.enforce_eager and not r.exact and runs_in_process(config)
        return found | {"kernel_config": KERNEL_CONFIG} if own_norms else found
    found.pop("block_size")
    return found | {
        "gpu_memory_utilization": r.gpu_memory,
        "enable_sleep_mode": config.cluster.placement == "colocated",
    }


def runs_in_process(config: Config) -> bool:
    """Whether the engine runs inside the actor."""
    return config.cluster.device == "cpu" and config.rollout.tensor_parallel == 1


def sampling_params(request: Request, stop_ids: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_new_tokens - len(partial_tokens(request)),
        seed=request.seed,
        logprobs=0,  # the sampled token's
        detokenize=False,
        stop_token_ids=[] if request.ignore_end else stop_ids,
        ignore_eos=request.ignore_end,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def token_prompt(request: Request, salt: str) -> Any:
    """What is there already is the prompt of what is to come."""
    tokens = {"prompt_token_ids": [*request.tokens, *partial_tokens(request)]}
    return tokens | ({"cache_salt": salt} if salt else {})


def partial_tokens(request: Request) -> list[int]:
    """The tokens of its completion that are there already."""
    return request.partial.tokens.tolist() if request.partial else []


def request_id(request: Request) -> str:
    return f"{request.uid}/{request.index}"


async def collect_outputs(finished: "asyncio.Queue[Any]", count: int) -> AsyncIterator[list[Any]]:
    """So many outputs, in lists; an exception among them is raised. None waits longer than a quarter of the time this has taken."""
    began = time.monotonic()
    while count:
        outs = [await finished.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(MAX_BATCHING_DELAY_S, (time.monotonic() - began) / 4)):
                while len(outs) < count:
                    outs.append(await finished.get())
        for out in outs:
            if isinstance(out, Exception):
                raise out
        count -= len(outs)
        yield outs


class InProcessEngine:
    """vLLM's synchronous engine, stepped from the actor's event loop, for all callers together."""

    def __init__(self, settings: dict[str, Any], exact: bool = False):
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if exact:
            from workers.cpu import exact_engine

            exact_engine.use_exact_attention()
        else:
            from workers.cpu import norms

            norms.register_kernels()
        if not settings["enforce_eager"]:
            compiling.allow_compiling("rollout.enforce_eager false", "rollout.enforce_eager true")
        register_architecture(settings["model"], settings["trust_remote_code"])
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings), enable_multiprocessing=False)
        self.queue_by_request: dict[str, asyncio.Queue[Any]] = {}  # by request, who waits for it
        self.lock = asyncio.Lock()  # of who steps the engine, or changes its weights
        self.step_task: asyncio.Task[None] | None = None

    async def generate(self, requests: list[Request], stop_ids: list[int], salt: str = "") -> AsyncIterator[list[Any]]:
        finished: asyncio.Queue[Any] = asyncio.Queue()
        try:
            for r in requests:
                self.engine.add_request(request_id(r), token_prompt(r, salt), sampling_params(r, stop_ids))
                self.queue_by_request[request_id(r)] = finished
            if not self.step_task or self.step_task.done():
                self.step_task = asyncio.ensure_future(self.step_until_done())
            async for outs in collect_outputs(finished, len(requests)):
                yield outs
        finally:
            self.engine.abort_request([n for r in requests if self.queue_by_request.pop(n := request_id(r), None)])

    async def step_until_done(self) -> None:
        try:
            while self.engine.has_unfinished_requests():
                async with self.lock:
                    outs = self.engine.step()
                for out in outs:
                    if out.finished:
                        self.queue_by_request.pop(out.request_id).put_nowait(out)
                await asyncio.sleep(0)  # callers, and other calls to the actor, get their turn
        except Exception as error:
            for finished in set(self.queue_by_request.values()):
                finished.put_nowait(error)

    async def stop_early(self) -> None:
        from vllm.v1.engine import FinishReason

        states = self.engine.output_processor
        for name, finished in self.queue_by_request.items():
            [own] = states.external_req_ids[name]
            finished.put_nowait(states.request_states[own].make_request_output([], None, FinishReason.ABORT, None))
        self.engine.abort_request(list(self.queue_by_request))
        self.queue_by_request.clear()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        async with self.lock:
            yield

    async def set_weight_version(self, version: int) -> None:
        self.engine.set_weight_version(str(version))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return list(self.engine.collective_rpc(method, kwargs=arguments))

    async def inspect(self, method: str) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self.engine.collective_rpc(method)))

    async def reset_prefix_cache(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise RuntimeError(PREFIX_CACHE_NOT_RESET)

    async def sleep(self) -> None:
        """A CPU engine has its memory to itself."""

    async def wake(self, part: str) -> None:
        """It never slept."""


class AsyncEngine:
    """vLLM's AsyncLLM, its core in a child process, and with tensor parallelism a process for each device."""

    def __init__(self, settings: dict[str, Any]):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self.running_ids: set[str] = set()
        self.sleeping_parts: set[str] = set()

    async def answer_or_exit(self, answer: Awaitable[T]) -> T:
        """The core's answer. A core that has died does not come back: then the actor ends, and another takes its place."""
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

    async def generate(self, requests: list[Request], stop_ids: list[int], salt: str = "") -> AsyncIterator[list[Any]]:
        finished: asyncio.Queue[Any] = asyncio.Queue()

        async def write(r: Request) -> None:
            async for out in self.engine.generate(
                token_prompt(r, salt), sampling_params(r, stop_ids), request_id=request_id(r)
            ):
                if out.finished:
                    finished.put_nowait(out)

        async def one(r: Request) -> None:
            try:
                await self.answer_or_exit(write(r))
            except Exception as error:
                finished.put_nowait(error)
            finally:
                self.running_ids.discard(request_id(r))

        self.running_ids.update(map(request_id, requests))
        tasks = [asyncio.ensure_future(one(r)) for r in requests]
        try:
            async for outs in collect_outputs(finished, len(requests)):
                yield outs
        finally:
            for task in tasks:
                task.cancel()

    async def stop_early(self) -> None:
        await self.answer_or_exit(self.engine.abort(list(self.running_ids)))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        await self.answer_or_exit(self.engine.pause_generation(mode="keep", clear_cache=False))
        try:
            yield
        finally:
            await self.answer_or_exit(self.engine.resume_generation())

    async def set_weight_version(self, version: int) -> None:
        await self.answer_or_exit(self.engine.update_weight_version(str(version)))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return list(await self.answer_or_exit(self.engine.collective_rpc(method, kwargs=arguments)))

    async def inspect(self, method: str) -> list[Any]:
        return await self.call_workers(method)

    async def reset_prefix_cache(self) -> None:
        if not await self.answer_or_exit(self.engine.reset_prefix_cache()):
            raise RuntimeError(PREFIX_CACHE_NOT_RESET)

    async def sleep(self) -> None:
        await self.answer_or_exit(self.engine.sleep(level=2))  # the weights come anew with the next sync
        self.sleeping_parts = {"weights", "kv_cache"}

    async def wake(self, part: str) -> None:
        if part in self.sleeping_parts:  # vLLM would end a pause of an engine that is awake
            self.sleeping_parts.discard(part)
            await self.answer_or_exit(self.engine.wake_up(tags=[part]))


def register_architecture(model: str, trust_remote_code: bool) -> None:
    """Names the model's class to vLLM, which would otherwise start a process that imports vLLM again to inspect it."""
    import importlib

    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for name in AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).architectures or []:
        if name in _TEXT_GENERATION_MODELS:
            module, cls = _TEXT_GENERATION_MODELS[name]
            ModelRegistry.register_model(
                name, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), cls)
            )
