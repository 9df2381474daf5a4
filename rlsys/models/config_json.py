"""Reads the sizes of a model from its config.json."""

from dataclasses import dataclass
from typing import Any

from rlsys.errors import ConfigError
from rlsys.models.latent import parse_latent
from rlsys.models.layer_kinds import dense_layers, is_attention, layer_kinds, window_of_model
from rlsys.models.mixers import MIXERS
from rlsys.models.shapes import GATES_SHARED_EXPERT, ModelShape

# The layers of these consist of attention or a mixer, and of a gated MLP or experts.
KNOWN_FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "olmo3", "granite", "smollm3", "phi3", "gpt_oss", "deepseek_v3", *MIXERS),
)
LIMITED_TO_WINDOW = ("doge", "llama4_text", "qwen2_moe", "cohere2", "cohere2_moe")  # see `context_from_config`
WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "deepseek_v3"),
    "granitemoehybrid",  # or none
)
EXPERTS_ARE_THE_MLP = ("mixtral", "gpt_oss", "granitemoehybrid")  # each as wide as `intermediate_size` says
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "smollm3", "lfm2")


@dataclass(frozen=True)
class ModelLimits:
    """ModelLimits(window=32768, vocabulary=151936). 0: the config.json does not say."""

    window: int = 0  # the longest sequence, in tokens
    vocabulary: int = 0  # tokens that the model has; its tokenizer may have more


def parse_config(name: str, settings: dict[str, Any]) -> ModelShape:
    """Reads a shape from the contents of a config.json."""
    s = settings.get("text_config", settings)
    family = str(s.get("model_type", ""))
    if family not in KNOWN_FAMILIES:
        raise ConfigError(
            f"{name}: the layers of model_type `{family}` are not known here; known: {', '.join(KNOWN_FAMILIES)}. "
            "`rlsys train` may run it all the same."
        )
    kinds, window, latent = layer_kinds(s), window_of_model(s), parse_latent(s)
    attention = sum(map(is_attention, kinds))
    if not attention:
        raise ConfigError(f"{name}: none of its layers has attention, and such models are not known here.")
    experts = count_experts(s)
    heads = int(s["num_attention_heads"])
    qkv_bias = bool(s.get("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss")))
    return ModelShape(
        name,
        family,
        int(s["num_hidden_layers"]),
        int(s["hidden_size"]),
        heads,
        heads if latent else int(s.get("num_key_value_heads") or heads),
        latent.head_dim if latent else int(s.get("head_dim") or s["hidden_size"] // heads),
        mlp_width(s, experts),
        int(s["vocab_size"]),
        tied=is_tied(settings, s),
        context=context_from_config(s),
        experts=experts,
        active_experts=int(s.get("num_experts_per_tok") or 0) if experts else 0,
        shared_intermediate=shared_width(s) if experts else 0,
        dense_layers=dense_layers(s) if experts else 0,
        dense_intermediate=int(s["intermediate_size"]) if experts and dense_layers(s) else 0,
        qkv_bias=qkv_bias or family in ("qwen2", "qwen2_moe"),
        output_bias=qkv_bias and family not in ("qwen2", "qwen2_moe"),
        mlp_bias=bool(s.get("mlp_bias")),
        caps_scores=bool(s.get("attn_logit_softcapping", family == "gemma2")),
        caps_logits=bool(s.get("final_logit_softcapping", family == "gemma2")),
        sinks=family == "gpt_oss",
        window=window,
        windowed=sum(kind == "sliding_attention" for kind in kinds) if window else 0,
        latent=latent,
        mixer=MIXERS[family](s) if family in MIXERS else None,
        mixer_layers=len(kinds) if family == "falcon_h1" else len(kinds) - attention,
        mixes_beside_attention=family == "falcon_h1",
    )


def is_tied(settings: dict[str, Any], s: dict[str, Any]) -> bool:
    default = s.get("tie_word_embeddings", s.get("tie_embedding", s["model_type"] in TIED_BY_DEFAULT))
    return bool(settings.get("tie_word_embeddings", default))


def count_experts(s: dict[str, Any]) -> int:
    if s["model_type"] not in WITH_EXPERTS or dense_layers(s) == int(s["num_hidden_layers"]):
        return 0
    stated = [s[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in s]
    if not stated:
        raise KeyError("num_experts")
    return int(stated[0] or 0)


def mlp_width(s: dict[str, Any], experts: int) -> int:
    """The width of the MLP, or of one expert."""
    family, width = s["model_type"], int(s.get("block_ff_dim") or s["intermediate_size"])
    if experts:
        return width if family in EXPERTS_ARE_THE_MLP else int(s["moe_intermediate_size"])
    if family == "granitemoehybrid":
        return shared_width(s)
    if family == "lfm2" and s.get("block_auto_adjust_ff_dim", True):
        factor, multiple = s.get("block_ffn_dim_multiplier", 1.0), int(s.get("block_multiple_of", 256))
        width = int(2 * width / 3)
        return width if factor is None else -(-int(factor * width) // multiple) * multiple
    return width


def shared_width(s: dict[str, Any]) -> int:
    """The width of the experts that every token passes."""
    if s["model_type"] == "deepseek_v3":
        return int(s.get("n_shared_experts", 1) or 0) * int(s["moe_intermediate_size"])
    if s["model_type"] == "granitemoehybrid":
        return int(s["shared_intermediate_size"])
    return int(s["shared_expert_intermediate_size"] or 0) if s["model_type"] in GATES_SHARED_EXPERT else 0


def limits_from_config(settings: dict[str, Any]) -> ModelLimits:
    vocabulary = int((settings.get("text_config") or settings).get("vocab_size") or 0)
    return ModelLimits(context_from_config(settings), vocabulary)


def context_from_config(settings: dict[str, Any]) -> int:
    """The longest sequence, in tokens, that a model with this config.json can be trained on; 0 if it does not say.

    At most its window, for families that hand this to attention as a mask, because packed attention has no mask, or whose
    window engines see otherwise. And at most what it was trained on before LongRoPE, whose positions then depend on the
    longest sequence of a pack.
    """
    s = settings.get("text_config") or settings
    limits = [int(s.get("max_position_embeddings") or s.get("n_positions") or 0), length_before_longrope(s)]
    if s.get("model_type") in LIMITED_TO_WINDOW and s.get("use_sliding_window", True):
        limits.append(int(s.get("attention_chunk_size") or s.get("sliding_window") or 0))
    return min(filter(None, limits), default=0)


def length_before_longrope(settings: dict[str, Any]) -> int:
    """0 for a model without LongRoPE."""
    options = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    for rope in (options, *(o for o in options.values() if isinstance(o, dict))):  # or by type of layer
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            key = "original_max_position_embeddings"
            return int(rope.get(key) or settings.get(key) or 0)
    return 0


def head_size_from_config(settings: dict[str, Any]) -> int:
    """Numbers in a query of one attention head; 0 if the config.json does not say, or has latent attention."""
    s = settings.get("text_config", settings)
    heads = int(s.get("num_attention_heads") or 0)
    if not heads or s.get("kv_lora_rank"):
        return 0
    return int(s.get("head_dim") or int(s.get("hidden_size") or 0) // heads)
