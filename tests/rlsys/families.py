"""Tiny random models of many families, in float32. Each one mixes tokens in another way."""

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlsys.batching.packing import pack
from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.decoder import let_model_find_decoder
from rlsys.forward.logprobs import PackedLogprobs
from rlsys.forward.mixers import fold_mixers
from rlsys.types import Batch, Pack, Prompt, Sample

VOCABULARY = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
NO_HEAD_DIM = ("falcon", "deepseek_v2", "glm4_moe_lite", "minicpm3")  # follows from the other sizes
REFUSED: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "attention_chunk_size": 6,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "bloom": {},
    "falcon": {},
    "phi": {},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "deepseek_v32": LATENT
    | ROUTED
    | {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["indexed_attention"] * 2,
        "index_topk": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6, "original_max_position_embeddings": 128},
    "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_5_text": LINEAR,
    "qwen3_next": MOE | LINEAR | {"shared_expert_intermediate_size": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.7},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "glm4_moe": ROUTED,
    "glm4_moe_lite": LATENT | ROUTED | {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": ROUTED | {"n_shared_experts": 1},
    "mimo_v2_flash": ROUTED
    | {
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": MOE | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "kimi_linear": LATENT
    | MOE
    | {
        "q_lora_rank": None,
        "num_experts_per_token": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "seed_oss": {},
    "exaone4": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 6, "logit_scale": 0.5, "layer_types": ["sliding_attention", "full_attention"]},
    "jamba": {"mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "minimax": {"num_local_experts": 2},
    "minicpm3": LATENT,
    "gemma4_text": {
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "stablelm": {},
    "nemotron": {},
}


def build_family(name: str, **options: Any) -> Any:
    """A random model, also of a family that is in no table; its weights are large enough for what it computes to matter."""
    torch.manual_seed(0)
    common = {key: size for key, size in COMMON.items() if key != "head_dim" or name not in NO_HEAD_DIM}
    config = AutoConfig.for_model(name, **common | (FAMILIES | REFUSED).get(name, {}) | options)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or parameter_name.endswith("sinks"):
                parameter.normal_(0, 0.3)
    return model.eval()


# --- in packs ---

MASKED_WINDOW = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
PROMPTS, COMPLETIONS, GROUPS = (10, 5), (7, 12, 9), (0, 0, 1)


def make_batch() -> Batch:
    """Three sequences, two of them with one prompt; some are longer than the windows of `FAMILIES`."""
    tokens = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in range(20)]
    prompts = [Prompt(f"p{i}", "", "", tokens[n].tolist(), {}) for i, n in enumerate(PROMPTS)]
    samples = [
        Sample(f"p{g}", i, "", tokens[n].numpy().astype(np.int32), np.zeros(n, dtype=np.float32), "stop", 0)
        for i, (g, n) in enumerate(zip(GROUPS, COMPLETIONS, strict=True))
    ]
    return Batch(prompts, samples, np.array(GROUPS), np.zeros(3, dtype=np.float32), [])


def make_packed(model: PreTrainedModel, fold: bool = True) -> PackedLogprobs:
    model.set_attn_implementation(PACKED_ATTENTION)
    let_model_find_decoder(model)
    if fold:
        fold_mixers(model.get_decoder())
    return PackedLogprobs(model)


def one_pack(share_prompts: bool) -> Pack:
    batch = make_batch()
    [[together]] = pack(batch, range(3), ranks=1, tokens_per_pack=1000, share_prompts=share_prompts)
    return together
