"""What a model is made of, from its config.json or from a table of usual ones: parameters, tensors, work. Nothing is downloaded."""

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.config.cache import hub_cache
from rlsys.config.schema import ConfigError
from rlsys.models import flops
from rlsys.packs.balance import DEFAULT_PAIRS_PER_TOKEN

KNOWN_FAMILIES = flops.FAMILIES
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `Model("Qwen/Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, tied=True, window=32768)`"""

    name: str
    family: str  # model_type of its config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # size of one
    intermediate: int  # of the MLP; of one expert where there are several
    vocabulary: int
    tied: bool  # whether the output layer is the embedding
    context: int  # tokens it can see; 0: it does not say
    experts: int = 0
    active_experts: int = 0
    shared_intermediate: int = 0  # of an expert that every token passes
    qkv_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of attention's output

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """As wide as values."""
        return self.kv_heads * self.head_dim

    @property
    def has_qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe", "gemma3_text")

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention."""
        found = self.hidden * (2 * self.query_width + 2 * self.key_width)
        found += (self.query_width + 2 * self.key_width) * self.qkv_bias + self.hidden * self.output_bias
        if self.family == "olmo2":
            return found + self.query_width + self.key_width
        return found + 2 * self.head_dim * self.has_qk_norm

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a layer's MLP, all experts."""
        one = 3 * self.hidden * self.intermediate
        if not self.experts:
            return one
        shared = 3 * self.hidden * self.shared_intermediate + self.hidden if self.shared_intermediate else 0
        return self.experts * (one + self.hidden) + shared

    @property
    def layer_parameters(self) -> int:
        norms = 4 if self.family in ("gemma2", "gemma3_text") else 2
        return self.attention_parameters + self.mlp_parameters + norms * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.hidden + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes."""
        if not self.experts:
            return self.parameters
        idle = (self.experts - self.active_experts) * 3 * self.hidden * self.intermediate
        return self.parameters - self.layers * idle

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor."""
        return max(self.embedding_parameters, self.hidden * self.intermediate, self.hidden * self.query_width)

    def kv_bytes_per_token(self, width: int) -> int:
        """Of a token, all layers."""
        return 2 * self.layers * self.key_width * width

    def can_split(self, wide: int) -> bool:
        """Whether vLLM can deal it out to so many: heads of keys are repeated where there are too few of them."""
        keys = self.kv_heads % wide == 0 or wide % self.kv_heads == 0
        return keys and self.heads % wide == 0 and self.intermediate % wide == 0

    @property
    def flop_counter(self) -> flops.FlopCounter:
        inner = (
            self.intermediate * self.active_experts + self.shared_intermediate if self.experts else self.intermediate
        )
        return flops.FlopCounter(
            self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, inner, self.vocabulary
        )


def tensor_parallel_problem(model: ModelShape, wide: int) -> str:
    """What is in the way of `rollout.tensor_parallel`, or nothing."""
    if model.can_split(wide):
        return ""
    good = [str(n) for n in range(1, min(model.heads, 64) + 1) if model.can_split(n)]
    return (
        f"rollout.tensor_parallel ({wide}) does not divide {model.name}: {model.heads} attention heads, {model.kv_heads} of keys and "
        f"values, an MLP of {model.intermediate:,}. It may be {', '.join(good)}."
    )


def parse_config(name: str, settings: dict[str, Any]) -> ModelShape:
    """From the contents of a config.json."""
    s = settings.get("text_config", settings)
    family = str(s.get("model_type", ""))
    if family not in KNOWN_FAMILIES:
        raise ConfigError(
            f"{name}: nothing is known of what a `{family}` is made of; known: {', '.join(KNOWN_FAMILIES)}. `rlsys train` may run it all the same."
        )
    experts = int(s.get("num_experts") or s.get("num_local_experts") or 0)
    inner = s.get("moe_intermediate_size", s["intermediate_size"]) if experts else s["intermediate_size"]
    heads = int(s["num_attention_heads"])
    qwen2 = family in ("qwen2", "qwen2_moe")
    return ModelShape(
        name,
        family,
        int(s["num_hidden_layers"]),
        int(s["hidden_size"]),
        heads,
        int(s.get("num_key_value_heads") or heads),
        int(s.get("head_dim") or s["hidden_size"] // heads),
        int(inner),
        int(s["vocab_size"]),
        tied=bool(settings.get("tie_word_embeddings", s.get("tie_word_embeddings", family in TIED_BY_DEFAULT))),
        context=context_from_config(s),
        experts=experts,
        active_experts=int(s.get("num_experts_per_tok") or 0),
        shared_intermediate=int(s.get("shared_expert_intermediate_size") or 0) if experts else 0,
        qkv_bias=qwen2 or bool(s.get("attention_bias")),
        output_bias=not qwen2 and bool(s.get("attention_bias")),
    )


def _of(
    family: str, name: str, sizes: tuple[int, int, int, int, int, int, int], *, tied: bool, window: int
) -> ModelShape:
    return ModelShape(name, family, *sizes, tied=tied, context=window, qkv_bias=family == "qwen2")


# layers, hidden, heads, kv_heads, head, inner, vocabulary
_USUAL = (
    _of("qwen2", "builtin:tiny", (2, 128, 4, 4, 32, 256, 13), tied=True, window=64),
    _of("qwen2", "Qwen2.5-0.5B", (24, 896, 14, 2, 64, 4864, 151936), tied=True, window=32768),
    _of("qwen2", "Qwen2.5-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=True, window=131072),
    _of("qwen2", "Qwen2.5-3B", (36, 2048, 16, 2, 128, 11008, 151936), tied=True, window=32768),
    _of("qwen2", "Qwen2.5-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, window=131072),
    _of("qwen2", "Qwen2.5-14B", (48, 5120, 40, 8, 128, 13824, 152064), tied=False, window=131072),
    _of("qwen2", "Qwen2.5-32B", (64, 5120, 40, 8, 128, 27648, 152064), tied=False, window=131072),
    _of("qwen2", "Qwen2.5-72B", (80, 8192, 64, 8, 128, 29568, 152064), tied=False, window=131072),
    _of("qwen2", "Qwen2.5-Math-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=True, window=4096),
    _of("qwen2", "Qwen2.5-Math-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, window=4096),
    _of("qwen2", "DeepSeek-R1-Distill-Qwen-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=False, window=131072),
    _of("qwen2", "DeepSeek-R1-Distill-Qwen-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, window=131072),
    _of("qwen3", "Qwen3-0.6B", (28, 1024, 16, 8, 128, 3072, 151936), tied=True, window=40960),
    _of("qwen3", "Qwen3-1.7B", (28, 2048, 16, 8, 128, 6144, 151936), tied=True, window=40960),
    _of("qwen3", "Qwen3-4B", (36, 2560, 32, 8, 128, 9728, 151936), tied=True, window=40960),
    _of("qwen3", "Qwen3-8B", (36, 4096, 32, 8, 128, 12288, 151936), tied=False, window=40960),
    _of("qwen3", "Qwen3-14B", (40, 5120, 40, 8, 128, 17408, 151936), tied=False, window=40960),
    _of("qwen3", "Qwen3-32B", (64, 5120, 64, 8, 128, 25600, 151936), tied=False, window=40960),
    replace(
        _of("qwen3_moe", "Qwen3-30B-A3B", (48, 2048, 32, 4, 128, 768, 151936), tied=False, window=40960),
        experts=128,
        active_experts=8,
    ),
    _of("llama", "Llama-3.2-1B", (16, 2048, 32, 8, 64, 8192, 128256), tied=True, window=131072),
    _of("llama", "Llama-3.2-3B", (28, 3072, 24, 8, 128, 8192, 128256), tied=True, window=131072),
    _of("llama", "Llama-3.1-8B", (32, 4096, 32, 8, 128, 14336, 128256), tied=False, window=131072),
    _of("llama", "Llama-3.1-70B", (80, 8192, 64, 8, 128, 28672, 128256), tied=False, window=131072),
    _of("llama", "Llama-3.3-70B", (80, 8192, 64, 8, 128, 28672, 128256), tied=False, window=131072),
    _of("llama", "SmolLM2-135M", (30, 576, 9, 3, 64, 1536, 49152), tied=True, window=8192),
    _of("llama", "SmolLM2-360M", (32, 960, 15, 5, 64, 2560, 49152), tied=True, window=8192),
    _of("llama", "SmolLM2-1.7B", (24, 2048, 32, 32, 64, 8192, 49152), tied=True, window=8192),
    _of("mistral", "Mistral-7B-v0.3", (32, 4096, 32, 8, 128, 14336, 32768), tied=False, window=32768),
)
KNOWN_SHAPES = {model.name.lower(): model for model in _USUAL}
NAME_SUFFIXES = ("-instruct", "-base", "-it", "-coder", "-thinking", "-2507")  # of the same shape
CONTEXT_BY_NAME = {  # of variants that see more or less than what they are called after
    r"qwen2\.5-[\d.]+b-instruct|qwen2\.5-coder-.*|qwen3-.*-base": 32768,
    r"qwen3-.*-2507|qwen3-coder-.*": 262144,
}


def look_up_shape(name: str) -> ModelShape | None:
    """By its hub name: the owner and what was trained do not change a shape, but for how much it sees."""
    whole = name.rpartition("/")[2].lower().removeprefix("meta-")
    bare, window = (
        whole.replace("-coder-", "-"),
        [w for like, w in CONTEXT_BY_NAME.items() if re.fullmatch(like, whole)],
    )
    while True:
        if bare in KNOWN_SHAPES:
            found = replace(KNOWN_SHAPES[bare], name=name)
            return replace(found, context=window[0]) if window else found
        shorter = next((bare.removesuffix(v) for v in NAME_SUFFIXES if bare.endswith(v)), None)
        if shorter is None:
            return None
        bare = shorter


def model_shape(path: str, file: str | Path = "") -> tuple[ModelShape, str]:
    """The model at `model.path`, and where its shape is from. `file` is a config.json to take instead."""
    if file:
        return _from_file(path, Path(file).expanduser()), str(file)
    if (found := find_model_shape(path)) is not None:
        return found
    raise ConfigError(
        f"model.path: {path} is not on this machine, and its shape is not one of the usual ones. "
        f"Give its config.json with --model-config FILE, or download it: hf download {path} config.json"
    )


def find_model_shape(path: str) -> tuple[ModelShape, str] | None:
    """A model whose shape this machine can tell, and where that is from."""
    if (found := find_config_file(path)) is not None:
        return _from_file(path, found), str(found)
    if (model := look_up_shape(path)) is not None:
        return model, "the table of usual shapes"
    return None


def known_model_shape(path: str) -> ModelShape | None:
    """The same, or nothing where it is put together in a way that is not known."""
    with contextlib.suppress(ConfigError):
        if (found := find_model_shape(path)) is not None:
            return found[0]
    return None


def context_from_config(settings: dict[str, Any]) -> int:
    """Tokens that a model with these settings, of its config.json, can see and be trained on; 0: they do not say.

    No more than its layers' sliding window, where they have one: packed attention does not.
    """
    window, sliding = (int(settings.get(name) or 0) for name in ("max_position_embeddings", "sliding_window"))
    unless_said = not str(settings.get("model_type")).startswith("qwen")
    slides = settings.get("use_sliding_window", unless_said)
    if layers := settings.get("layer_types"):
        slides = "sliding_attention" in layers
    return min(window or sliding, sliding) if slides and sliding else window


def context_of_model(path: str) -> int:
    """The same by a model's own config.json, whatever else it is made of; 0: it does not say, or is not here."""
    if (found := find_config_file(path)) is None:
        return 0
    try:
        return context_from_config(json.loads(found.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def pairs_per_token(path: str) -> float:
    """Of query and key, that are as much work as a token's linear layers in the model at `model.path`."""
    try:
        work = model_shape(path)[0].flop_counter
    except ConfigError:
        return DEFAULT_PAIRS_PER_TOKEN
    return work.flops_per_token / work.flops_per_pair


def _from_file(name: str, file: Path) -> ModelShape:
    try:
        return parse_config(name, json.loads(file.read_text()))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not the config.json of a language model: {type(error).__name__} {error}"
        ) from None


def find_config_file(path: str) -> Path | None:
    """Of a directory, or of a hub name that was downloaded before."""
    own = Path(path).expanduser() / "config.json"
    return own if own.is_file() else find_cached_config(path)


def find_cached_config(name: str) -> Path | None:
    """The config.json of a hub name that was downloaded before."""
    folder, _ = hub_cache()
    snapshots = folder / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    return found[-1] if found else None
