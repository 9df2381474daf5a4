"""Small models of every family whose sizes are known, in variants that count in another way."""

from typing import Any

COMMON = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
LOCAL_MOE = {"num_local_experts": 6, "num_experts_per_tok": 2}
SHARED = MOE | {"shared_expert_intermediate_size": 40}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 3}
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
LATENT |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 2}

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", {}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("olmo3", {"attention_bias": True, "num_hidden_layers": 5}),
    ("granite", {}),
    ("smollm3", {}),
    ("gemma", {}),
    ("gemma2", {"num_hidden_layers": 5}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 9}),
    ("qwen3_moe", MOE),
    ("qwen3_moe", MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen2_moe", SHARED),
    ("mixtral", LOCAL_MOE),
    ("gpt_oss", LOCAL_MOE),
    ("gpt_oss", LOCAL_MOE | {"attention_bias": False, "num_hidden_layers": 3}),
    ("deepseek_v3", LATENT | {"q_lora_rank": 10}),
    ("deepseek_v3", LATENT | {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 9}),
    ("deepseek_v3", LATENT | {"q_lora_rank": 10, "attention_bias": True}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_text", LINEAR | {"full_attention_interval": 2, "attention_bias": True}),
    ("qwen3_5_moe_text", LINEAR | SHARED),
    ("qwen3_next", LINEAR | SHARED | {"mlp_only_layers": [0]}),
    ("lfm2", {"full_attn_idxs": [1, 3], "block_multiple_of": 10}),
    ("lfm2", {"full_attn_idxs": [2], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    (
        "granitemoehybrid",
        MAMBA | LOCAL_MOE | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 40},
    ),
    (
        "granitemoehybrid",
        MAMBA
        | {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"mamba_conv_bias": False, "mamba_proj_bias": True, "shared_intermediate_size": 40},
    ),
    ("falcon_h1", MAMBA | {"mamba_d_ssm": 64}),
    (
        "falcon_h1",
        MAMBA
        | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mlp_bias": True, "projectors_bias": True}
        | {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
]


def small_config(family: str, more: dict[str, Any], *, tied: bool = False) -> Any:
    """The configuration that transformers makes of the family."""
    from transformers import AutoConfig

    settings = COMMON | more | {"tie_word_embeddings": tied}
    if family == "deepseek_v3":
        del settings["head_dim"]
    return AutoConfig.for_model(family, **settings)


def build_without_weights(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
