"""vLLM's own asynchronous scheduler, as a core on a GPU has it, and a model that samples arithmetic."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 32  # tokens of a cache block
IN_FLIGHT = 2  # batches that a GPU has at a time


def make_scheduler(folder: Path, build: Any, blocks: int = 1000, asynchronous: bool = True, **settings: Any) -> Any:
    import torch
    from transformers import AutoConfig

    AutoConfig.for_model("qwen2", max_position_embeddings=256, architectures=["Qwen2ForCausalLM"]).save_pretrained(
        folder
    )
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 64, "max_model_len": 256, "block_size": BLOCK_SIZE}
    more = {"skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": True}
    config = EngineArgs(str(folder), **(sizes | more | settings)).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    parts = {"kv_cache_config": cache, "structured_output_manager": StructuredOutputManager(config)}
    return build(config, **parts, block_size=BLOCK_SIZE)


def plain(vllm_config: Any, **parts: Any) -> Any:
    return vllm_config.scheduler_config.get_scheduler_cls()(vllm_config=vllm_config, **parts)


def make_request(name: str, prompt: list[int], length: int) -> Request:
    params = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256))


def token(name: str, position: int) -> int:
    """What the model samples there."""
    return (int(name) * 7 + position) % 50


def logprob(name: str, position: int) -> float:
    return -int(name) - position / 8


class Core:
    """Schedules a batch before the one before is read, as vLLM's core does."""

    def __init__(self, scheduler: Any):
        self.scheduler, self.running = scheduler, deque[Any]()
        self.sampled: dict[str, int] = {}  # by request

    def step(self) -> tuple[Any, dict[int, Any]]:
        """Returns what was scheduled, and the messages of the batch that was read."""
        planned = self.scheduler.schedule()
        if planned.total_num_scheduled_tokens:
            self.running.append((planned, self.sample(planned)))
            if len(self.running) < IN_FLIGHT:
                return planned, {}
        return planned, self.scheduler.update_from_output(*self.running.popleft()) if self.running else {}

    def sample(self, planned: Any) -> ModelRunnerOutput:
        names = list(planned.num_scheduled_tokens)
        complete = [not self.scheduler.requests[name].is_prefill_chunk for name in names]
        positions = [self.sampled.get(name, 0) for name in names]
        self.sampled |= {name: p + c for name, p, c in zip(names, positions, complete, strict=True)}
        rows = list(zip(names, positions, strict=True))
        logprobs = LogprobsLists(
            np.array([[token(*row)] for row in rows], np.int32),
            np.array([[logprob(*row)] for row in rows], np.float32),
            np.array([1 + p % 5 for p in positions], np.int32),
        )
        tokens = [[token(*row)] if whole else [] for row, whole in zip(rows, complete, strict=True)]
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens, logprobs)
