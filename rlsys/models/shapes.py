"""The sizes of a decoder and what follows from them: parameters, tensors, work."""

from dataclasses import dataclass

from rlsys.forward.heads import heads_divide
from rlsys.models.families import Family, family_of
from rlsys.models.flops import FlopCounter
from rlsys.models.latent import LatentAttention
from rlsys.models.matrices import Matrix
from rlsys.models.mixers import Mixer
from rlsys.models.mlp import gated_mlp


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
    head_dim: int  # of queries and keys
    intermediate: int  # width of the MLP; of one expert if there are several
    vocabulary: int
    tied: bool  # the output layer is the embedding
    context: int  # the longest sequence in tokens; 0: unknown
    experts: int = 0
    active_experts: int = 0
    shared_intermediate: int = 0  # width of the expert that every token passes
    dense_layers: int = 0  # of a model with experts: layers with one MLP, of width `dense_intermediate`
    dense_intermediate: int = 0
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output layer
    mlp_bias: bool = False
    caps_scores: bool = False  # attention has a soft cap
    caps_logits: bool = False
    sinks: bool = False  # attention has a sink per head
    window: int = 0  # tokens that a layer with a sliding window sees
    windowed: int = 0  # layers with one
    latent: LatentAttention | None = None
    mixer: Mixer | None = None
    mixer_layers: int = 0
    mixes_beside_attention: bool = False  # else in its place

    @property
    def facts(self) -> Family:
        return family_of(self.family)

    @property
    def attention_layers(self) -> int:
        return self.layers if self.mixes_beside_attention else self.layers - self.mixer_layers

    @property
    def windowed_layers(self) -> int:
        return min(self.windowed, self.attention_layers)

    @property
    def expert_layers(self) -> int:
        return self.layers - min(self.dense_layers, self.layers) if self.experts else 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def gated_query_width(self) -> int:
        """With the numbers that gate attention's output."""
        return self.query_width * (1 + self.facts.gates_attention)

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value if self.latent else self.head_dim

    @property
    def cached_width(self) -> int:
        """Numbers of a token that an engine keeps in a layer with attention."""
        return self.latent.cached if self.latent else self.key_width + self.value_width

    @property
    def has_qk_norm(self) -> bool:
        return self.facts.qk_norm == "each head"

    @property
    def active_intermediate(self) -> int:
        """Width of all MLPs together that a token passes in a layer."""
        if not self.experts:
            return self.intermediate
        return max(self.intermediate * self.active_experts + self.shared_intermediate, self.dense_intermediate)

    @property
    def linear_layers(self) -> list[Matrix]:
        """All but experts, routers and the output layer."""
        mixer = self.mixer.linear if self.mixer else ()
        mixing = [Matrix(name, inputs, outputs, self.mixer_layers) for name, inputs, outputs in mixer]
        return [*self.attention_matrices, *mixing, *self.mlp_matrices]

    @property
    def attention_matrices(self) -> list[Matrix]:
        h, q, k, v, n = self.hidden, self.query_width, self.key_width, self.value_width, self.attention_layers
        if self.latent:
            return self.latent.matrices(h, self.heads, n)
        *inputs, output = self.facts.attention_names
        widths = [self.gated_query_width, k, v]
        if len(inputs) == 1:
            widths = [sum(widths)]
        return [
            *(Matrix(name, h, width, n) for name, width in zip(inputs, widths, strict=True)),
            Matrix(output, q, h, n),
        ]

    @property
    def mlp_matrices(self) -> list[Matrix]:
        h, names = self.hidden, self.facts.mlp_names
        if not self.experts:
            return gated_mlp(names, h, self.intermediate, self.layers)
        matrices = gated_mlp(names, h, self.dense_intermediate, self.dense_layers) if self.dense_layers else []
        if self.shared_intermediate:
            matrices += gated_mlp(names, h, self.shared_intermediate, self.expert_layers)
        if self.shared_intermediate and self.facts.gates_shared_expert:
            matrices.append(Matrix("shared_expert_gate", h, 1, self.expert_layers))
        return matrices

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.intermediate + self.hidden if self.facts.biased_experts else 0
        return 3 * self.hidden * self.intermediate + biases

    @property
    def router_parameters(self) -> int:
        return self.experts * (self.hidden + self.facts.biased_experts)

    @property
    def attention_vectors(self) -> int:
        """Parameters of an attention layer that are not in matrices: biases, norms and sinks."""
        if self.latent:
            biases = (self.latent.query_rank + self.latent.cached) * self.qkv_bias
            return biases + self.hidden * self.output_bias + self.latent.norms
        norms = 2 * self.head_dim * self.has_qk_norm
        norms += (self.query_width + self.key_width) * (self.facts.qk_norm == "all heads")
        biases = (self.gated_query_width + self.key_width + self.value_width) * self.qkv_bias
        return norms + biases + self.hidden * self.output_bias + self.heads * self.sinks

    @property
    def parameters_of_layers(self) -> int:
        norms = self.layers * self.facts.layer_norms * self.hidden
        vectors = self.attention_layers * self.attention_vectors
        vectors += self.mixer_layers * self.mixer.others if self.mixer else 0
        vectors += self.layers * (2 * self.intermediate + self.hidden) * self.mlp_bias
        experts = self.expert_layers * (self.experts * self.expert_parameters + self.router_parameters)
        return norms + vectors + experts + sum(matrix.parameters for matrix in self.linear_layers)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.parameters_of_layers + self.hidden + embeddings

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes."""
        idle = self.experts - self.active_experts
        return self.parameters - self.expert_layers * idle * self.expert_parameters

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor. All experts of a layer are together in two."""
        experts = 2 * self.experts * self.hidden * self.intermediate
        return max(self.embedding_parameters, experts, *(matrix.size for matrix in self.linear_layers))

    def kv_bytes_per_token(self, width: int) -> int:
        """Returns the bytes of a token's keys and values in all layers, in numbers of `width` bytes."""
        return self.attention_layers * self.cached_width * width

    def cached_bytes(self, tokens: float, width: int) -> float:
        """Returns the bytes of a sequence's keys, values and states that its next token is computed from."""
        full = self.attention_layers - self.windowed_layers
        seen = full * tokens + self.windowed_layers * min(tokens, self.window)
        states = self.mixer_layers * self.mixer.state_bytes(width) if self.mixer else 0
        return seen * self.cached_width * width + states

    def parameters_read(self, sequences: float) -> float:
        """Returns how many parameters some of this many tokens pass, if each chooses its experts at random."""
        if not self.experts:
            return float(self.parameters)
        idle = self.experts * (1 - self.active_experts / self.experts) ** sequences
        return self.parameters - self.expert_layers * idle * self.expert_parameters

    def can_split(self, parts: int) -> bool:
        """Returns True if vLLM can split the model into this many parts."""
        widths = [self.intermediate, self.dense_intermediate, self.mixer.heads if self.mixer else 0]
        return heads_divide(self.heads, self.kv_heads, parts) and not any(width % parts for width in widths)

    @property
    def flop_counter(self) -> FlopCounter:
        experts = self.expert_layers * (
            3 * self.hidden * self.intermediate * self.active_experts + self.hidden * self.experts
        )
        mixing = self.mixer_layers * self.mixer.flops if self.mixer else 0.0
        pair = 2.0 * self.heads * (self.head_dim + self.value_dim)
        return FlopCounter(
            flops_per_token=2.0 * (sum(matrix.parameters for matrix in self.linear_layers) + experts) + mixing,
            flops_per_pair=pair * (self.attention_layers - self.windowed_layers),
            flops_per_output=2.0 * self.hidden * self.vocabulary,
            flops_per_pair_in_window=pair * self.windowed_layers,
            window=self.window,
        )


def can_share_packs(shape: ModelShape, ranks: int) -> bool:
    """Returns True if ranks can share packs: they exchange heads of attention, and mixers have none."""
    return ranks == 1 or (not shape.mixer and heads_divide(shape.heads, shape.kv_heads, ranks))


def tensor_parallel_problem(shape: ModelShape, parts: int) -> str:
    """Says why `rollout.tensor_parallel` does not suit the model; empty if it does."""
    if shape.can_split(parts):
        return ""
    possible = [str(n) for n in range(1, min(shape.heads, 64) + 1) if shape.can_split(n)]
    return (
        f"rollout.tensor_parallel ({parts}) does not divide {shape.name}: {shape.heads} attention heads, "
        f"{shape.kv_heads} of keys and values, an MLP of {shape.intermediate:,}. It may be {', '.join(possible)}."
    )
