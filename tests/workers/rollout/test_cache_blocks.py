"""What `rlsys plan` says of an engine's cache, against the groups and pages that vLLM divides it into."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from launch.tools.estimates.cache import sequence_bytes
from rlsys.config.schema import ClusterConfig, Config, RolloutConfig
from rlsys.models.cache_blocks import cache_blocks
from rlsys.models.config_json import parse_config
from rlsys.models.shapes import ModelShape

GPUS = Config(cluster=ClusterConfig(device="gpu"), rollout=RolloutConfig(dtype="bfloat16"))
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1000, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64}
MAMBA = {"mamba_n_heads": 48, "mamba_d_state": 128, "mamba_d_ssm": 3072, "shared_intermediate_size": 64}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def shape(family: str, **more: Any) -> ModelShape:
    return parse_config("it", SIZES | {"model_type": family, "max_position_embeddings": 4096} | more)


def of_vllm(model: ModelShape, block: int, padded: int | None = None) -> list[Any]:
    """The groups of the model's layers."""
    same = {"block_size": block, "num_kv_heads": model.kv_heads, "head_size": 64, "dtype": torch.bfloat16}
    full = model.attention_layers - model.windowed_layers
    specs: dict[str, Any] = {f"full.{i}": FullAttentionSpec(**same) for i in range(full)}
    window = SlidingWindowSpec(**same, sliding_window=model.window or 1)
    specs |= {f"window.{i}": window for i in range(model.windowed_layers)}
    if mixer := model.mixer:
        state = MambaSpec(
            block_size=block,
            shapes=((mixer.kept,), (mixer.state,)),
            dtypes=(torch.bfloat16, torch.float32 if mixer.state_width else torch.bfloat16),
            page_size_padded=padded,
            mamba_cache_mode="align",
        )
        specs |= {f"mixer.{i}": state for i in range(model.mixer_layers)}
    return _get_kv_cache_groups_uniform_page_size(specs)


@pytest.mark.parametrize(
    "model",
    [
        shape("gpt_oss", num_hidden_layers=24, **MOE),
        shape("gemma3_text", num_hidden_layers=34, sliding_window=512),
        shape("olmo3", num_hidden_layers=5, sliding_window=512),
        shape("mistral", num_hidden_layers=6, sliding_window=512),
    ],
    ids=lambda m: m.family,
)
def test_layers_with_a_window_keep_no_more_than_that(model: ModelShape) -> None:
    groups = of_vllm(model, 16)
    size = max(len(group.layer_names) for group in groups)
    for tokens in (64, 2048):
        kept = [min(tokens, getattr(g.kv_cache_spec, "sliding_window", None) or tokens) for g in groups]
        page = groups[0].kv_cache_spec.page_size_bytes / 16
        assert sequence_bytes(GPUS, model, tokens) == size * page * sum(kept)


@pytest.mark.parametrize(
    "model",
    [
        shape("qwen3_5_text", num_hidden_layers=32, mamba_ssm_dtype="float32"),
        shape("granitemoehybrid", num_hidden_layers=10, layer_types=["mamba"] * 9 + ["attention"], **MAMBA, **MOE),
        shape("falcon_h1", num_hidden_layers=6, **MAMBA),
        shape("lfm2", num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ],
    ids=lambda m: m.family,
)
def test_layers_with_a_mixer_keep_states_in_blocks_of_the_same_size(model: ModelShape) -> None:
    blocks = cache_blocks(model, 2, 1)
    attention = FullAttentionSpec(block_size=blocks.tokens, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    [*_, last] = groups = of_vllm(model, blocks.tokens, attention.page_size_bytes)
    state = last.kv_cache_spec.real_page_size_bytes
    assert attention.page_size_bytes * (1 - 16 / blocks.tokens) < state <= attention.page_size_bytes, (
        "the fewest tokens"
    )
    size = max(len(group.layer_names) for group in groups)
    assert blocks.size == size * attention.page_size_bytes
    aligned = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="align"))
    for tokens in (16, 3000):
        needed = [
            g.kv_cache_spec.max_memory_usage_bytes(aligned) / attention.page_size_bytes
            if isinstance(g.kv_cache_spec, MambaSpec)
            else math.ceil(tokens / blocks.tokens)
            for g in groups
        ]
        assert blocks.sequence_blocks(tokens) == sum(needed)


def test_latent_keys_and_values_are_few_and_on_every_gpu_of_an_engine() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
    model = shape("deepseek_v3", num_hidden_layers=61, **latent, **sizes)
    wide = Config(cluster=GPUS.cluster, rollout=RolloutConfig(dtype="bfloat16", tensor_parallel=8))
    assert sequence_bytes(GPUS, model, 100) == sequence_bytes(wide, model, 100) == 100 * 61 * (512 + 64) * 2


def test_on_cpu_layers_with_a_window_keep_all_tokens() -> None:
    model = shape("mistral", num_hidden_layers=6, sliding_window=512)
    assert sequence_bytes(Config(), model, 2048) == 2048 * 6 * 2 * 4 * 64 * 4
