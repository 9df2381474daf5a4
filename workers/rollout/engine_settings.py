"""Environment and arguments of vLLM's engines."""

import json
from pathlib import Path
from typing import Any

from rlsys.config.derived import DEFAULT_BATCHED_TOKENS, max_batched_tokens, runs_eagerly
from rlsys.config.schema import Config
from rlsys.episodes.settings import plays
from rlsys.models.cache_blocks import cache_blocks
from rlsys.models.families import family_of
from rlsys.models.lookup import known_model_shape
from workers.start.gpu_environment import shared_gpu_environment

# All processes of an engine are on one node and talk to each other over loopback.
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
COMMON_ENVIRONMENT = LOOPBACK | {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # answers between an engine's processes keep their Python type
}
# Set before vLLM is imported, in the actor's runtime environment.
CPU_ENVIRONMENT = COMMON_ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # vLLM's CPU build cannot load its own cache; torch's cache works
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # with threads, a sequence's split would depend on the others
    "OMP_NUM_THREADS": "1",
}
SHARED_TAILS = {
    "kv_connector": "PromptTails",
    "kv_connector_module_path": "workers.cpu.prompt_tails",
    "kv_role": "kv_consumer",
}
BLOCK_SIZE = 32  # tokens per block of a KV cache on CPU; samples share the full blocks of their prompt
USUAL_LARGEST_GRAPH = 512  # sequences; vLLM launches a step of more kernel by kernel, unless it is told sizes
BESIDE_CACHE = 2 << 30  # bytes of an engine on a GPU, besides weights and logits; assumed
# On CPU, of a model with states: vLLM would cache them with the prefixes, and for that compute prompts in parts.
STATE_ARGUMENTS = {"enable_prefix_caching": False}
GPU_ENVIRONMENT = COMMON_ENVIRONMENT | {
    "TRITON_F32_DEFAULT": "ieee",  # float32 as the policy computes it: vLLM's attention would round its factors to TF32
}


def engine_environment(config: Config) -> dict[str, str]:
    """Returns the environment of an engine's processes."""
    threads = {"OMP_NUM_THREADS": str(config.rollout.threads)}
    device = CPU_ENVIRONMENT | threads if config.cluster.device == "cpu" else GPU_ENVIRONMENT
    return device | shared_gpu_environment(config)


def runs_in_process(config: Config) -> bool:
    """Returns whether the engine runs inside the actor."""
    return config.cluster.device == "cpu" and config.rollout.tensor_parallel == 1


def engine_arguments(config: Config, model: str, backend: str, longest_sequence: int) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `EngineArgs`."""
    r = config.rollout
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": model,
        "skip_tokenizer_init": not (
            r.stop or plays(config)
        ),  # stop strings, which episodes may have, are looked for in the text
        "dtype": r.dtype,
        "max_model_len": longest_sequence,
        "max_num_seqs": r.max_sequences,
        "tensor_parallel_size": r.tensor_parallel,
        "enable_prefix_caching": True,
        "enforce_eager": runs_eagerly(config),
        "seed": config.run.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "hf_overrides": unstated_options(model),
        "generation_config": "vllm",  # the trainer would not see sampling defaults of the model's authors
        "logprobs_mode": "processed_logprobs",  # after temperature
        "disable_log_stats": True,
        "worker_extension_cls": "workers.rollout.vllm_extension.WorkerExtension",
        "weight_transfer_config": {"backend": backend},
    }
    # On CPU vLLM's default stays where it can: vLLM refuses more sequences than tokens.
    if config.cluster.device == "gpu" or r.max_sequences > DEFAULT_BATCHED_TOKENS:
        arguments["max_num_batched_tokens"] = max_batched_tokens(config, longest_sequence)
    if not runs_in_process(config):
        kind = "in_flight_scheduler" if config.pipeline.in_flight else "scheduler"
        arguments["scheduler_cls"] = f"workers.rollout.output_blocks.build_{kind}"
    elif config.pipeline.in_flight:
        arguments["scheduler_cls"] = "workers.rollout.fresh_prefixes.build_scheduler"
    if r.tensor_parallel > 1:
        # In a placement group, vLLM would ask Ray for processes and for GPUs that the engine's actor has already.
        arguments["distributed_executor_backend"] = "mp"
    if config.cluster.device == "cpu":
        return arguments | cpu_arguments(config)
    arguments["max_num_seqs"] = sequences_with_room(config, model)
    if not arguments["enforce_eager"] and arguments["max_num_seqs"] > USUAL_LARGEST_GRAPH:
        arguments["cudagraph_capture_sizes"] = graph_sizes(arguments["max_num_seqs"])
    return arguments | {
        "gpu_memory_utilization": r.gpu_memory,
        "enable_sleep_mode": config.cluster.placement == "colocated",
    }


def graph_sizes(sequences: int) -> list[int]:
    """Returns the numbers of sequences that have a CUDA graph: vLLM's usual ones, and on to all sequences."""
    return sorted({1, 2, 4, *range(8, 256, 8), *range(256, sequences, 16), sequences})


def sequences_with_room(config: Config, model: str) -> int:
    """`rollout.max_sequences`, or fewer for a model with mixers: vLLM does not start with more than its cache has states for."""
    shape, asked = known_model_shape(model), config.rollout.max_sequences
    if shape is None or not shape.mixer:
        return asked
    import torch

    r, width = config.rollout, 4 if config.rollout.dtype == "float32" else 2
    share = r.gpu_memory * torch.cuda.get_device_properties(0).total_memory
    beside = width * shape.parameters / r.tensor_parallel + (8 + width) * asked * shape.vocabulary + BESIDE_CACHE
    possible = min(asked, cache_blocks(shape, width, r.tensor_parallel).most_sequences(max(share - beside, 0.0)))
    if possible < asked:
        print(
            f"rollout.max_sequences: an engine decodes {possible} sequences at the same time, not {asked}: its cache has room "
            f"for the states of so many. More rollout.gpu_memory or rollout.tensor_parallel makes room for more.",
            flush=True,
        )
    return possible


def unstated_options(model: str) -> dict[str, Any]:
    """Returns what vLLM needs to know of a model, and transformers does not write into its config.json."""
    file = Path(model) / "config.json"
    stated = json.loads(file.read_text()) if file.exists() else {}
    options = family_of(stated.get("model_type")).engine_options(stated)
    return {name: value for name, value in options.items() if name not in stated}


def cpu_arguments(config: Config) -> dict[str, Any]:
    from workers.cpu.norms import KERNEL_CONFIG
    from workers.cpu.sampled_logprobs import LOGPROBS_MODE

    r = config.rollout
    arguments: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": r.kv_cache_mb << 20,
        # A prompt in two parts would rewind its random numbers, which vLLM's CPU build cannot.
        "enable_chunked_prefill": False,
        "logprobs_mode": LOGPROBS_MODE,
        # Of latent attention; others ignore it. On a CPU with AMX, vLLM would take one that has no float32.
        "attention_backend": "CPU_MLA",
    }
    if runs_in_process(config):
        arguments["kv_transfer_config"] = SHARED_TAILS
    # A compiled engine fuses its norms with what is around them.
    if runs_eagerly(config) and not r.exact and runs_in_process(config):
        arguments["kernel_config"] = KERNEL_CONFIG
    return arguments
