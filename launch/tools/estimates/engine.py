"""What a rollout engine holds in memory."""

from dataclasses import replace

from launch.tools.estimates.cache import engine_blocks, sequence_bytes
from launch.tools.estimates.devices import GIB
from launch.tools.estimates.memory import (
    COMPILER_MIB,
    CUDA_CONTEXT,
    IMPORT_MIB,
    MIB,
    MOMENTS,
    NCCL_BUFFERS,
    WIDTH,
    Moments,
    Parts,
    ProcessMemory,
    SequenceLengths,
    add_parts,
)
from launch.tools.estimates.sync_buffers import SYNC_BUCKET, device_sync_bytes
from rlsys.config.derived import max_batched_tokens, runs_eagerly
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape

SLEEPING_ENGINE = 1.2 * GIB  # on a GPU; assumed, not measured
CUDA_GRAPHS = 0.5 * GIB  # assumed, not measured


def engine_memory(c: Config, model: ModelShape, lengths: SequenceLengths, gpu_bytes: float) -> ProcessMemory:
    """Estimates an engine. `gpu_bytes`: memory of a GPU; not used on CPU."""
    if c.cluster.device == "cpu":
        return engine_on_cpu(c, model, lengths)
    awake = engine_parts(c, model, gpu_bytes)
    asleep: Parts = {"fixed": SLEEPING_ENGINE}
    device = dict.fromkeys(MOMENTS[1:], awake)
    if c.cluster.placement == "colocated":
        device |= dict.fromkeys(("score", "update", "reduce", "step", "save"), asleep)
        device["sync"] = add_parts(asleep, {"weights": awake["weights"]})
    device["sync"] = add_parts(device["sync"], {"buckets": device_sync_bytes(c, model)})
    host: Moments = {"load": {"fixed": 2.0 * IMPORT_MIB["rollout"] * MIB}}  # the actor and its engine core
    return ProcessMemory("rollout", c.rollout.engines, host=host, device=device, gpus=c.rollout.tensor_parallel)


def frozen_engine_memory(c: Config, model: ModelShape, lengths: SequenceLengths, gpu_bytes: float) -> ProcessMemory:
    """Estimates an engine on one device that never gets other weights."""
    alone = replace(c, rollout=replace(c.rollout, tensor_parallel=1), cluster=replace(c.cluster, placement="separate"))
    memory = engine_memory(alone, model, lengths, gpu_bytes)
    return replace(memory, host=without_sync(memory.host), device=without_sync(memory.device))


def without_sync(moments: Moments) -> Moments:
    return {
        moment: {name: size for name, size in parts.items() if name != "buckets"}
        for moment, parts in moments.items()
        if moment != "sync"
    }


def engine_on_cpu(c: Config, model: ModelShape, lengths: SequenceLengths) -> ProcessMemory:
    r, t, width = c.rollout, c.trainer, WIDTH[c.rollout.dtype]
    sequences = min(r.max_sequences, -(-t.prompts_per_step * t.samples_per_prompt // r.engines))
    prefill = min(max_batched_tokens(c, lengths.longest), sequences * lengths.prompt)
    work: Parts = {
        "activations": prefill * width * 4.0 * model.active_intermediate,
        "logits": 12.0 * sequences * model.vocabulary,
    }
    weights = width * model.parameters
    received = SYNC_BUCKET if c.sync.transport == "object_store" else weights
    # With tensor parallelism, an engine core and its workers run beside the actor; otherwise all are one process.
    processes = 1 + (r.tensor_parallel + 1 if r.tensor_parallel > 1 else 0)
    imports = IMPORT_MIB["rollout"] * processes + COMPILER_MIB * (not runs_eagerly(c))
    fixed: Parts = {"KV cache": r.kv_cache_mb * MIB * r.tensor_parallel, "fixed": imports * MIB}
    held = add_parts({"weights": weights}, fixed, {"buckets": min(received, weights)})
    return ProcessMemory("rollout", r.engines, host={"generate": add_parts(held, work), "sync": held})


def engine_parts(c: Config, model: ModelShape, gpu_bytes: float) -> Parts:
    """Returns what each GPU of an engine holds: vLLM's share of `gpu_bytes`. The rest is KV cache, which may be negative."""
    r, width = c.rollout, WIDTH[c.rollout.dtype]
    parts = r.tensor_parallel
    weights = width * model.parameters / parts
    work = max_batched_tokens(c, 0) * width * (2 * model.active_intermediate / parts + 4 * model.hidden)
    logits = r.max_sequences * model.vocabulary * (8.0 + width)
    fixed = CUDA_CONTEXT + NCCL_BUFFERS * (parts > 1) + (0.0 if runs_eagerly(c) else CUDA_GRAPHS)
    cache = r.gpu_memory * gpu_bytes - weights - work - logits - fixed
    return {"weights": weights, "activations": work, "logits": logits, "KV cache": cache, "fixed": fixed}


def kv_cache_tokens(c: Config, model: ModelShape, gpu_bytes: float, length: float) -> float:
    """Returns how many tokens fit into an engine's cache, in sequences of this length."""
    return kv_cache_bytes(c, model, gpu_bytes) * length / sequence_bytes(c, model, length)


def most_sequences(c: Config, model: ModelShape, gpu_bytes: float) -> int:
    """Returns how many sequences an engine decodes at the same time: on GPUs no more than a model with mixers has states for."""
    if not model.mixer or c.cluster.device == "cpu":
        return c.rollout.max_sequences
    most = engine_blocks(c, model).most_sequences(kv_cache_bytes(c, model, gpu_bytes))
    return min(c.rollout.max_sequences, most)


def kv_cache_bytes(c: Config, model: ModelShape, gpu_bytes: float) -> float:
    """Returns the size of the cache, on one of an engine's GPUs."""
    if c.cluster.device == "cpu":
        return float(c.rollout.kv_cache_mb * MIB)
    return max(engine_parts(c, model, gpu_bytes)["KV cache"], 0.0)
