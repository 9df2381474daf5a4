"""How fast an engine decodes a model of the shape of Qwen2.5 0.5B, and what log-probs cost.

    python tests/gpu/decoding.py                   # CUDA graphs for decoding
    python tests/gpu/decoding.py --single          # each token sent by itself, as vLLM does
    python tests/gpu/decoding.py --eager
    python tests/gpu/decoding.py --cpu             # a tiny model without a GPU, to compare `front`

`front` is the CPU time per token of the process that asks the engine: it must stay below the time of a token.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from table import build_model

from rlsys.types import Request
from workers.rollout import async_engine
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.engine_settings import CPU_ENVIRONMENT, GPU_ENVIRONMENT
from workers.rollout.vllm_requests import Stops, sampling_params

PROMPT, COMPLETION = 128, 256  # tokens


def settings(model: str, options: argparse.Namespace) -> dict[str, Any]:
    graphs = {"mode": 0} if options.eager else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    gpu = {"gpu_memory_utilization": 0.5, "enforce_eager": options.eager, "compilation_config": graphs}
    cpu = {"kv_cache_memory_bytes": 1 << 29, "enforce_eager": True, "enable_chunked_prefill": False}
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 256,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "scheduler_cls": None if options.single else "workers.rollout.output_blocks.build_scheduler",
    } | (cpu if options.cpu else gpu)


async def measure(engine: AsyncEngine, name: str, sequences: int) -> None:
    requests = [
        Request(f"{name} {sequences}", i, [3 + (i + j) % 8 for j in range(PROMPT)], i, 1.0, COMPLETION, ignore_end=True)
        for i in range(sequences)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    async for _ in engine.generate(requests, Stops([])):
        pass
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    tokens = sequences * COMPLETION
    print(
        f"{name:10} {sequences:4} sequences  {tokens / seconds:8,.0f} tokens/s  front {cpu / tokens * 1e6:5.1f} µs",
        flush=True,
    )


def without_logprobs(request: Request, stops: Stops) -> Any:
    params = sampling_params(request, stops)
    params.logprobs = None
    return params


async def run(model: str, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    engine = AsyncEngine(settings(model, options))
    print(f"engine ready after {time.perf_counter() - began:.0f} s", flush=True)
    await measure(engine, "warm up", 256)
    for sequences in (256, 64):
        await measure(engine, "log-probs", sequences)
        async_engine.sampling_params = without_logprobs
        await measure(engine, "none", sequences)
        async_engine.sampling_params = sampling_params
    engine.engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    os.environ.update(CPU_ENVIRONMENT if options.cpu else GPU_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        build_model("tiny" if options.cpu else "0.5b").save_pretrained(folder)
        asyncio.run(run(folder, options))


if __name__ == "__main__":
    main()
