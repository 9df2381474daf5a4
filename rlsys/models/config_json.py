"""Reads the sizes of a model from its config.json."""

from dataclasses import dataclass
from typing import Any

from rlsys.errors import ConfigError
from rlsys.models.families import KNOWN, Family, family_of
from rlsys.models.latent import parse_latent
from rlsys.models.layer_kinds import WINDOWED, is_attention
from rlsys.models.shapes import ModelShape


@dataclass(frozen=True)
class ModelLimits:
    """ModelLimits(window=32768, vocabulary=151936). 0: the config.json does not say."""

    window: int = 0  # the longest sequence, in tokens
    vocabulary: int = 0  # tokens that the model has; its tokenizer may have more


def parse_config(name: str, settings: dict[str, Any]) -> ModelShape:
    """Reads a shape from the contents of a config.json."""
    s = settings.get("text_config", settings)
    family = family_of(s.get("model_type", ""))
    if not family.layers_known:
        known = ", ".join(other.name for other in KNOWN)
        raise ConfigError(
            f"{name}: the layers of model_type `{family.name}` are not known here; known: {known}. "
            "`rlsys train` may run it all the same."
        )
    kinds, window, latent = kinds_of_layers(s, family), window_of_model(s, family), parse_latent(s)
    attention = sum(map(is_attention, kinds))
    if not attention:
        raise ConfigError(f"{name}: none of its layers has attention, and such models are not known here.")
    dense, experts = family.dense_layers(s), count_experts(s, family)
    heads = int(s["num_attention_heads"])
    bias = bool(s.get("attention_bias", family.attention_bias != "none"))
    return ModelShape(
        name,
        family.name,
        int(s["num_hidden_layers"]),
        int(s["hidden_size"]),
        heads,
        heads if latent else int(s.get("num_key_value_heads") or heads),
        latent.head_dim if latent else int(s.get("head_dim") or s["hidden_size"] // heads),
        int(s[family.expert_width]) if experts else family.mlp_width(s),
        int(s["vocab_size"]),
        tied=is_tied(settings, s, family),
        context=context_from_config(s),
        experts=experts,
        active_experts=int(s.get("num_experts_per_tok") or 0) if experts else 0,
        shared_intermediate=family.shared_width(s) if experts else 0,
        dense_layers=dense if experts else 0,
        dense_intermediate=int(s["intermediate_size"]) if experts and dense else 0,
        qkv_bias=bias or family.attention_bias == "qkv",
        output_bias=bias and family.attention_bias != "qkv",
        mlp_bias=bool(s.get("mlp_bias")),
        caps_scores=bool(s.get("attn_logit_softcapping", family.soft_caps)),
        caps_logits=bool(s.get("final_logit_softcapping", family.soft_caps)),
        sinks=family.sinks,
        window=window,
        windowed=kinds.count(WINDOWED) if window else 0,
        latent=latent,
        mixer=family.mixer(s) if family.mixer else None,
        mixer_layers=len(kinds) if family.mixes_beside_attention else len(kinds) - attention,
        mixes_beside_attention=family.mixes_beside_attention,
    )


def kinds_of_layers(s: dict[str, Any], family: Family) -> list[str]:
    if family.all_windowed:
        return [WINDOWED] * int(s["num_hidden_layers"])
    return list(s.get("layer_types") or family.kinds(s))[: int(s["num_hidden_layers"])]


def window_of_model(s: dict[str, Any], family: Family) -> int:
    """Returns how many tokens a layer with a sliding window sees; 0: no layer has one."""
    if not s.get("use_sliding_window", not family.window_off):
        return 0
    return int(s.get("sliding_window", family.window) or 0)


def is_tied(settings: dict[str, Any], s: dict[str, Any], family: Family) -> bool:
    default = s.get("tie_word_embeddings", s.get("tie_embedding", family.tied))
    return bool(settings.get("tie_word_embeddings", default))


def count_experts(s: dict[str, Any], family: Family) -> int:
    if not family.expert_width or family.dense_layers(s) == int(s["num_hidden_layers"]):
        return 0
    stated = [s[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in s]
    if not stated:
        raise KeyError("num_experts")
    return int(stated[0] or 0)


def limits_from_config(settings: dict[str, Any]) -> ModelLimits:
    vocabulary = int((settings.get("text_config") or settings).get("vocab_size") or 0)
    return ModelLimits(context_from_config(settings), vocabulary)


def context_from_config(settings: dict[str, Any]) -> int:
    """Returns the longest sequence, in tokens, that a model with this config.json can be trained on; 0 if it does not say.

    If a family gives attention its window as a mask, the limit is the window, because packed attention has no mask. The
    same holds if engines see its window otherwise. With LongRoPE the limit is the length before it, because positions
    then depend on the longest sequence of a pack.
    """
    s = settings.get("text_config") or settings
    limits = [int(s.get("max_position_embeddings") or s.get("n_positions") or 0), length_before_longrope(s)]
    if family_of(s.get("model_type")).window_is_mask and s.get("use_sliding_window", True):
        limits.append(int(s.get("attention_chunk_size") or s.get("sliding_window") or 0))
    return min(filter(None, limits), default=0)


def length_before_longrope(settings: dict[str, Any]) -> int:
    """Returns 0 for a model without LongRoPE."""
    options = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    for rope in (options, *(o for o in options.values() if isinstance(o, dict))):  # or by type of layer
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            key = "original_max_position_embeddings"
            return int(rope.get(key) or settings.get(key) or 0)
    return 0


def head_size_from_config(settings: dict[str, Any]) -> int:
    """Returns how many numbers a query of one attention head has; 0 if the config.json does not say, or has latent attention."""
    s = settings.get("text_config", settings)
    heads = int(s.get("num_attention_heads") or 0)
    if not heads or s.get("kv_lora_rank"):
        return 0
    return int(s.get("head_dim") or int(s.get("hidden_size") or 0) // heads)
