"""What a GGUF file of each supported architecture holds, and what becomes of it in config.json and in the weights.

A key or a tensor that nothing here takes is refused: it may change what the model computes. Where a file says nothing,
llama.cpp's rule decides, for the file was made to be run by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.errors import ConfigError

Facts = dict[str, Any]
Array = np.ndarray[Any, Any]
Relation = Callable[[Array], Array]  # the file's values -> the model's

ORIGINAL = "Use the original checkpoint: `rlsys import hf:NAME`, or its directory in model.path."

# Keys of an architecture that change nothing if they have one of these values.
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "attention.causal": [True],  # as all models here
    "expert_count": [0],  # no experts
    "expert_used_count": [0],
    "rope.scaling.finetuned": [True, False],  # how it was trained
    "tensor_data_layout": ["Meta AI original pth"],  # the order of rows that each file of llama has
}


@dataclass(frozen=True)
class Architecture:
    """Names of tensors in a layer, by their names in the file, and the settings that no key carries."""

    model_type: str
    layer: dict[str, str]
    settings: Facts
    read: Callable[[Facts, Facts], Facts]  # keys that are left, settings so far -> the architecture's own settings
    norm_less_one: bool = False  # Gemma multiplies by 1 + weight, and a file holds the sum
    rotates_neighbors: bool = False  # in the file; transformers rotates halves
    can_untie: bool = True


def take(keys: Facts, name: str, default: Any = None) -> Any:
    """Removes a key, so that what is left at the end was used by nobody."""
    value = keys.pop(name, default)
    if value is None:
        raise ConfigError(f"The file lacks {name}.")
    if isinstance(value, list):
        raise ConfigError(f"{name} differs between layers: {value}. {ORIGINAL}")
    return value


def read_config(facts: Facts, tensors: dict[str, Array]) -> Facts:
    """The config.json that computes what the file does."""
    name = facts["general.architecture"]
    architecture = find_architecture(name)
    keys = {key.removeprefix(f"{name}."): value for key, value in facts.items() if key.startswith(f"{name}.")}
    hidden, heads = take(keys, "embedding_length"), take(keys, "attention.head_count")
    head = take(keys, "attention.key_length", hidden // heads)
    vocabulary, context = len(tensors["token_embd.weight"]), take(keys, "context_length")
    for key, wanted in (
        ("attention.value_length", head),
        ("rope.dimension_count", head),
        ("vocab_size", vocabulary),
    ):
        if (value := take(keys, key, wanted)) != wanted:
            raise ConfigError(f"{name}.{key} is {value}, not {wanted}: such a model cannot be imported. {ORIGINAL}")
    settings = {
        "model_type": architecture.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "head_dim": head,
        "num_attention_heads": heads,
        "num_key_value_heads": take(keys, "attention.head_count_kv", heads),
        "num_hidden_layers": take(keys, "block_count"),
        "intermediate_size": take(keys, "feed_forward_length"),
        "max_position_embeddings": context,
        "rms_norm_eps": take(keys, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(keys, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        **architecture.settings,
    }
    if "rope_freqs.weight" in tensors:
        settings["rope_parameters"] = read_llama3_scaling(tensors["rope_freqs.weight"], settings)
    settings |= architecture.read(keys, settings)
    refuse_left({f"{name}.{key}": value for key, value in keys.items() if value not in WITHOUT_EFFECT.get(key, [])})
    return settings


def find_architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ConfigError(f"GGUF files can be imported of {', '.join(ARCHITECTURES)}, not of {name}. {ORIGINAL}")
    return ARCHITECTURES[name]


def refuse_left(keys: Facts) -> None:
    if keys:
        listed = ", ".join(f"{key} = {str(value)[:60]}" for key, value in keys.items())
        raise ConfigError(f"The file has settings that the model would not get: {listed}. {ORIGINAL}")


def read_rope(keys: Facts, context: int) -> Facts:
    rope = {"rope_type": "default", "rope_theta": take(keys, "rope.freq_base", 10000.0)}
    kind = take(keys, "rope.scaling.type", "linear" if "rope.scaling.factor" in keys else "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": take(keys, "rope.scaling.factor")}
    elif kind != "none":
        refuse_left({"rope.scaling.type": kind})
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": take(keys, "rope.scaling.original_context_length", context),
            "beta_fast": take(keys, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": take(keys, "rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


def read_llama3_scaling(divisors: Array, settings: Facts) -> Facts:
    """The scaling of Llama 3.1 and 3.2, of which a file holds the result: what each frequency is divided by."""
    rope, head = settings["rope_parameters"], settings["head_dim"]
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if rope["rope_type"] != "default" or not (
        divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4)
    ):
        raise ConfigError(f"rope_freqs.weight is not the scaling of Llama 3.1 for {original} tokens. {ORIGINAL}")
    return rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def read_nothing_more(keys: Facts, settings: Facts) -> Facts:
    return {}


def read_qwen2(keys: Facts, settings: Facts) -> Facts:
    if settings["head_dim"] * settings["num_attention_heads"] != settings["hidden_size"]:
        raise ConfigError(
            f"qwen2.attention.key_length is {settings['head_dim']}, and {settings['num_attention_heads']} heads share "
            f"{settings['hidden_size']} values: such a model cannot be imported. {ORIGINAL}"
        )
    return {}


def read_gemma2(keys: Facts, settings: Facts) -> Facts:
    if settings["rope_parameters"]["rope_type"] == "yarn":
        refuse_left({"gemma2.rope.scaling.type": "yarn"})
    theta = settings["rope_parameters"]["rope_theta"]
    if (base := take(keys, "rope.freq_base_swa", theta)) != theta:
        refuse_left({"gemma2.rope.freq_base_swa": base})
    return {
        "sliding_window": take(keys, "attention.sliding_window", 4096),
        "layer_types": read_layer_types(keys, settings, period=2),
        "attn_logit_softcapping": take(keys, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": take(keys, "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": attention_scalar(settings, layers_of_27b=46),
    }


def read_gemma3(keys: Facts, settings: Facts) -> Facts:
    if settings["rope_parameters"]["rope_type"] == "yarn":
        refuse_left({"gemma3.rope.scaling.type": "yarn"})
    local = {"rope_type": "default", "rope_theta": take(keys, "rope.freq_base_swa", 10000.0)}
    return {
        "sliding_window": take(keys, "attention.sliding_window"),
        "layer_types": read_layer_types(keys, settings, period=6),
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": attention_scalar(settings, layers_of_27b=62),
    }


def read_layer_types(keys: Facts, settings: Facts, period: int) -> list[str]:
    """Each `period`-th layer sees all tokens, unless the file says which."""
    layers, pattern = settings["num_hidden_layers"], keys.pop("attention.sliding_window_pattern", period)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern > 0 for i in range(layers)]
    if len(slides) != layers:
        raise ConfigError(f"attention.sliding_window_pattern is for {len(slides)} layers, and the file has {layers}.")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def attention_scalar(settings: Facts, layers_of_27b: int) -> int:
    """No key carries it. Gemma's models of 27 billion parameters take the share of a head, the others its size."""
    if settings["num_hidden_layers"] == layers_of_27b:
        return int(settings["hidden_size"] // settings["num_attention_heads"])
    return int(settings["head_dim"])


PROJECTIONS = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
}
LLAMA = PROJECTIONS | {"ffn_norm.weight": "post_attention_layernorm.weight"}
GEMMA = PROJECTIONS | {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
HEAD_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
SILU, GELU = {"hidden_act": "silu"}, {"hidden_activation": "gelu_pytorch_tanh"}

ARCHITECTURES = {
    "llama": Architecture("llama", LLAMA, SILU, read_nothing_more, rotates_neighbors=True),
    "qwen2": Architecture("qwen2", LLAMA | BIASES, SILU, read_qwen2),
    "qwen3": Architecture("qwen3", LLAMA | HEAD_NORMS, SILU, read_nothing_more),
    "gemma2": Architecture("gemma2", GEMMA, GELU, read_gemma2, norm_less_one=True, can_untie=False),
    "gemma3": Architecture("gemma3_text", GEMMA | HEAD_NORMS, GELU, read_gemma3, norm_less_one=True),
}


def place_tensors(facts: Facts, names: set[str]) -> dict[str, tuple[str, str, Relation]]:
    """The file's name -> the model's, the words for how its values follow, and the formula."""
    name = facts["general.architecture"]
    architecture = find_architecture(name)
    places = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if "output.weight" in names and architecture.can_untie:
        places["output.weight"] = "lm_head.weight"
    for i in range(facts[f"{name}.block_count"]):
        places |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in architecture.layer.items()}
    beside = {"rope_freqs.weight"} if architecture.rotates_neighbors else set()  # becomes a setting
    for what, wrong in (("lacks", places.keys() - names), ("has", names - places.keys() - beside)):
        if wrong:
            some = ", ".join(sorted(wrong)[:3])
            raise ConfigError(
                f"The file {what} {len(wrong)} tensors {'of' if what == 'lacks' else 'that are not of'} a {name} model, "
                f"such as {some}. {ORIGINAL}"
            )
    return {source: (target, *relation(architecture, facts, source)) for source, target in places.items()}


def relation(architecture: Architecture, facts: Facts, source: str) -> tuple[str, Relation]:
    if architecture.norm_less_one and source.endswith("norm.weight"):
        return "less 1", lambda values: values - np.float32(1)
    if architecture.rotates_neighbors and source.endswith(("attn_q.weight", "attn_k.weight")):
        heads = facts["llama.attention.head_count"]
        if source.endswith("attn_k.weight"):
            heads = facts.get("llama.attention.head_count_kv", heads)
        return "with rows by halves, not by neighbors", lambda values: neighbors_to_halves(values, heads)
    return "equal", lambda values: values


def neighbors_to_halves(rows: Array, heads: int) -> Array:
    """A head's rows 0 1 2 3 4 5 -> 0 2 4 1 3 5."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
