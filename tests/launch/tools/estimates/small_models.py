"""Small models of the families that `rlsys plan` knows, each with its shape."""

import torch

from rlsys.forward.attention import PACKED_ATTENTION
from rlsys.forward.mixers import fold_mixers
from rlsys.models.config_json import parse_config

ATTENTION = {"granitemoehybrid": "attention"}  # as its configuration calls it
MIXING = {"granitemoehybrid": "mamba", "lfm2": "conv"}
MIXING |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention")
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40}
MOE |= {"num_local_experts": 6, "decoder_sparse_step": 1, "shared_intermediate_size": 40}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
LATENT |= {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 48, "mamba_d_state": 16, "mamba_d_ssm": 192, "mamba_chunk_size": 64}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
SPECIAL = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), MOE),
    "deepseek_v3": LATENT | MOE | {"first_k_dense_replace": 1},
    "qwen3_5_text": LINEAR,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), MOE | LINEAR),
    "granitemoehybrid": MOE | MAMBA,
    "falcon_h1": MAMBA,
}


def kinds_of_layers(family: str) -> list[str]:
    return [MIXING[family], ATTENTION.get(family, "full_attention")] if family in MIXING else [""]


def build_model(family: str, dtype: torch.dtype, mixing: str = "", **more: int):
    """`mixing`: what all layers but the first two mix by, which are of each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    settings = sizes | SPECIAL.get(family, {}) | more
    if family in MIXING:
        kinds = kinds_of_layers(family)
        settings["layer_types"] = kinds + [mixing or kinds[0]] * (settings["num_hidden_layers"] - 2)
    if family == "deepseek_v3":
        del settings["head_dim"]
    config = AutoConfig.for_model(family, **settings)
    lm = AutoModelForCausalLM.from_config(config).to(dtype).train()
    lm.set_attn_implementation(PACKED_ATTENTION)
    fold_mixers(lm.get_decoder())
    return lm, parse_config("it", config.to_dict())
