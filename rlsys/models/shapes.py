"""The sizes of a decoder and what follows from them: parameters, tensors, work. Read from a config.json."""

from dataclasses import dataclass
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.models.flops import FlopCounter
from rlsys.packs.heads import heads_divide

# The layers of these consist of queries, keys, values, output and a gated MLP of three matrices.
KNOWN_FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "granite", "smollm3"),
)
WINDOW_AS_MASK = ("doge", "llama4_text", "phimoe", "qwen2_moe")  # see `context_from_config`
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    ModelShape("Qwen/Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, tied=True, context=32768, qkv_bias=True)
    """

    name: str
    family: str  # model_type of its config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the MLP; of one expert if there are several
    vocabulary: int
    tied: bool  # the output layer is the embedding
    context: int  # the longest sequence in tokens; 0: unknown
    experts: int = 0
    active_experts: int = 0
    shared_intermediate: int = 0  # width of the expert that every token passes
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output layer
    caps_scores: bool = False  # attention has a soft cap
    caps_logits: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """The width of keys, which is that of values."""
        return self.kv_heads * self.head_dim

    @property
    def has_qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe", "gemma3_text")

    @property
    def layer_norms(self) -> int:
        """Norms of a layer's hidden states: before attention and MLP, or behind, or both."""
        return 4 if self.family in ("gemma2", "gemma3_text") else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention."""
        weights = self.hidden * (2 * self.query_width + 2 * self.key_width)
        biases = (self.query_width + 2 * self.key_width) * self.qkv_bias + self.hidden * self.output_bias
        if self.family == "olmo2":
            return weights + biases + self.query_width + self.key_width
        return weights + biases + 2 * self.head_dim * self.has_qk_norm

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a layer's MLP, all experts together."""
        expert = 3 * self.hidden * self.intermediate
        if not self.experts:
            return expert
        shared = 3 * self.hidden * self.shared_intermediate + self.hidden if self.shared_intermediate else 0
        return self.experts * (expert + self.hidden) + shared

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.layer_norms * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

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
        """Bytes of a token's keys and values in all layers, in numbers of `width` bytes."""
        return 2 * self.layers * self.key_width * width

    def can_split(self, parts: int) -> bool:
        """True if vLLM can split the model into so many parts."""
        return heads_divide(self.heads, self.kv_heads, parts) and self.intermediate % parts == 0

    @property
    def flop_counter(self) -> FlopCounter:
        width = self.intermediate
        if self.experts:
            width = self.intermediate * self.active_experts + self.shared_intermediate
        return FlopCounter(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, width, self.vocabulary)


# What the attention of vLLM's CPU build computes.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def tensor_parallel_problem(shape: ModelShape, parts: int) -> str:
    """Says why `rollout.tensor_parallel` does not suit the model; empty if it does."""
    if shape.can_split(parts):
        return ""
    possible = [str(n) for n in range(1, min(shape.heads, 64) + 1) if shape.can_split(n)]
    return (
        f"rollout.tensor_parallel ({parts}) does not divide {shape.name}: {shape.heads} attention heads, "
        f"{shape.kv_heads} of keys and values, an MLP of {shape.intermediate:,}. It may be {', '.join(possible)}."
    )


def parse_config(name: str, settings: dict[str, Any]) -> ModelShape:
    """Reads a shape from the contents of a config.json."""
    s = settings.get("text_config", settings)
    family = str(s.get("model_type", ""))
    if family not in KNOWN_FAMILIES:
        raise ConfigError(
            f"{name}: the layers of model_type `{family}` are not known here; known: {', '.join(KNOWN_FAMILIES)}. "
            "`rlsys train` may run it all the same."
        )
    experts = int(s.get("num_experts") or s.get("num_local_experts") or 0)
    intermediate = s.get("moe_intermediate_size", s["intermediate_size"]) if experts else s["intermediate_size"]
    heads = int(s["num_attention_heads"])
    qwen2 = family in ("qwen2", "qwen2_moe")
    tied = settings.get("tie_word_embeddings", s.get("tie_word_embeddings", family in TIED_BY_DEFAULT))
    return ModelShape(
        name,
        family,
        int(s["num_hidden_layers"]),
        int(s["hidden_size"]),
        heads,
        int(s.get("num_key_value_heads") or heads),
        int(s.get("head_dim") or s["hidden_size"] // heads),
        int(intermediate),
        int(s["vocab_size"]),
        tied=bool(tied),
        context=context_from_config(s),
        experts=experts,
        active_experts=int(s.get("num_experts_per_tok") or 0),
        shared_intermediate=int(s.get("shared_expert_intermediate_size") or 0) if experts else 0,
        qkv_bias=qwen2 or bool(s.get("attention_bias")),
        output_bias=not qwen2 and bool(s.get("attention_bias")),
        caps_scores=bool(s.get("attn_logit_softcapping", family == "gemma2")),
        caps_logits=bool(s.get("final_logit_softcapping", family == "gemma2")),
    )


def context_from_config(settings: dict[str, Any]) -> int:
    """The longest sequence, in tokens, that a model with this config.json can be trained on; 0 if it does not say.

    At most its window, for families that hand this to attention as a mask, because packed attention has no mask. And at
    most what it was trained on before LongRoPE, whose positions then depend on the longest sequence of a pack.
    """
    s = settings.get("text_config") or settings
    limits = [int(s.get("max_position_embeddings") or s.get("n_positions") or 0), length_before_longrope(s)]
    if s.get("model_type") in WINDOW_AS_MASK and s.get("use_sliding_window", True):
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
