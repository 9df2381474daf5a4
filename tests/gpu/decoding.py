"""How fast an engine decodes a model of the shape of Qwen2.5 0.5B, and what log-probs cost.

    python tests/gpu/decoding.py                   # CUDA graphs for decoding
    python tests/gpu/decoding.py --eager
    python tests/gpu/decoding.py --cpu             # a tiny model without a GPU, to compare `front`

`front` is the CPU time per token of the process that asks the engine: it must stay below the time of a token. `blocks` and `single`, in
which vLLM sends each token by itself, are measured in the same engine, so on the same host, and in turn. Above each stand the parts of
a step in the core (`core_clock.py`): ms of the clock, and of the CPU.
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
from host import host_figures
from table import build_model

from rlsys.types import Request
from workers.rollout import async_engine
from workers.rollout.async_engine import AsyncEngine
from workers.rollout.engine_settings import CPU_ENVIRONMENT, GPU_ENVIRONMENT
from workers.rollout.vllm_requests import Stops, sampling_params

ROOT = Path(__file__).parents[2]
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
        "scheduler_cls": "core_clock.build_clocked",
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
        f"{name:18} {sequences:4} sequences  {tokens / seconds:8,.0f} tokens/s  front {cpu / tokens * 1e6:5.1f} µs",
        flush=True,
    )


def print_planned_memory(options: argparse.Namespace) -> None:
    """What `rlsys plan` counts for an engine of these settings, to hold beside what the core prints."""
    from launch.tools.estimates.engine import engine_parts
    from rlsys.config.schema import ClusterConfig, Config, RolloutConfig
    from rlsys.models.known_shapes import look_up_shape

    if options.cpu:
        return
    import torch

    model = look_up_shape("Qwen/Qwen2.5-0.5B")
    assert model
    rollout = RolloutConfig(dtype="bfloat16", gpu_memory=0.5, max_sequences=256, enforce_eager=options.eager)
    memory = torch.cuda.get_device_properties(0).total_memory
    parts = engine_parts(Config(cluster=ClusterConfig(device="gpu"), rollout=rollout), model, memory)
    counted = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    print(f"plan: {sum(parts.values()) / 2**30:.2f} GiB ({counted})")


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
        for way in ("blocks", "single", "blocks again", "single again"):
            await measure(engine, way, sequences)
        async_engine.sampling_params = without_logprobs
        await measure(engine, "without log-probs", sequences)
        async_engine.sampling_params = sampling_params
    print_planned_memory(options)
    engine.engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    host_figures()
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])  # of the core's process
    os.environ.update((CPU_ENVIRONMENT if options.cpu else GPU_ENVIRONMENT) | {"PYTHONPATH": paths})
    if options.cpu:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        build_model("tiny" if options.cpu else "0.5b").save_pretrained(folder)
        asyncio.run(run(folder, options))


if __name__ == "__main__":
    main()
