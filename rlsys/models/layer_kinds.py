"""What each layer of a model mixes tokens by, as its config.json says or as its family does by default."""

from typing import Any

DEFAULT_WINDOWS = {"gpt_oss": 128} | dict.fromkeys(
    ("mistral", "gemma2", "gemma3_text", "olmo3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), 4096
)
WINDOW_IN_ALL = ("mistral", "mixtral", "phi3", "qwen3_moe")
ONE_IN_FULL = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, "gemma3_text": 6}  # of so many layers; the others have a window
ONE_WITH_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # of four layers, by default


def window_of_model(s: dict[str, Any]) -> int:
    """Tokens that a layer with a sliding window sees; 0: no layer has one."""
    family = s["model_type"]
    switched_off = family.startswith("qwen") or family == "smollm3"  # unless they say otherwise
    if not s.get("use_sliding_window", not switched_off):
        return 0
    return int(s.get("sliding_window", DEFAULT_WINDOWS.get(family)) or 0)


def layer_kinds(s: dict[str, Any]) -> list[str]:
    """One of `full_attention`, `sliding_attention` and others for each layer."""
    family, layers = s["model_type"], int(s["num_hidden_layers"])
    if family in WINDOW_IN_ALL:
        return ["sliding_attention"] * layers
    if s.get("layer_types"):
        return list(s["layer_types"])[:layers]
    if family in ONE_IN_FULL:
        period = int(s.get("sliding_window_pattern") or ONE_IN_FULL[family])
        return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    if family in ONE_WITH_ATTENTION:
        period = int(s.get("full_attention_interval") or 4)
        return ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(layers)]
    if family == "lfm2":
        full = s.get("full_attn_idxs")
        return ["full_attention" if full is None or i in full else "conv" for i in range(layers)]
    if family == "granitemoehybrid":
        return ["linear_attention"] * layers
    first = int(s.get("max_window_layers", 28)) if family.startswith("qwen") else layers
    return ["full_attention" if i < first else "sliding_attention" for i in range(layers)]


def is_attention(kind: str) -> bool:
    return kind in ("full_attention", "sliding_attention", "attention")


def dense_layers(s: dict[str, Any]) -> int:
    """Layers of a model with experts that have one MLP instead."""
    layers = int(s["num_hidden_layers"])
    if s["model_type"] == "deepseek_v3":
        return min(int(s.get("first_k_dense_replace", 3) or 0), layers)
    alone, step = s.get("mlp_only_layers") or [], int(s.get("decoder_sparse_step") or 1)
    return sum(i in alone or (i + 1) % step != 0 for i in range(layers))
