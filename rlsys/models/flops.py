"""Floating-point work that a step needs, counted from the model's sizes and the samples' lengths; multiply and add are two.

What is counted is what no one can leave out: a prompt once for its group, attention to earlier tokens only, the output layer only
where a token is drawn or scored. Work done twice (padding, recomputed activations, a prompt for each of its samples) adds nothing,
so that work over time over what the machine can do says how much of it was put to use.
"""

from dataclasses import dataclass
from typing import Any

# Layers of these are queries, keys, values, output and a gated MLP of three matrices; of others nothing is said.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo2", "granite", "smollm3"),
)


@dataclass(frozen=True)
class FlopCounter:
    """A decoder. Qwen2.5-0.5B: Shape(layers=24, hidden=896, heads=14, kv_heads=2, head=64, inner=4864, vocabulary=151936)"""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # size of one
    intermediate: int  # of the MLPs that a token passes in a layer, together
    vocabulary: int

    @property
    def flops_per_token(self) -> float:
        """Of a token in all layers, attention's products of queries and keys aside."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2.0 * self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def flops_per_pair(self) -> float:
        """Of a query and a key in all layers, values included."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def forward_flops(self, begin: int, end: int, outputs: int) -> float:
        """Tokens at positions begin … end - 1 of a sequence, and the output layer at `outputs` of them."""
        seen = (end * (end + 1) - begin * (begin + 1)) / 2  # each sees itself and what is before it
        return (
            (end - begin) * self.flops_per_token
            + seen * self.flops_per_pair
            + 2.0 * self.hidden * self.vocabulary * outputs
        )

    def group_flops(self, prompt: int, completions: list[int]) -> float:
        """A forward pass over the samples of one prompt, to draw their tokens or to score them. The last token is never an input."""
        work = self.forward_flops(0, prompt, 1)
        return work + sum(self.forward_flops(prompt, prompt + n - 1, n - 1) for n in completions if n)


def flop_counter(settings: Any) -> FlopCounter | None:
    """From a Hugging Face configuration; None for an architecture that is put together otherwise."""
    s = settings.get_text_config()
    if s.model_type not in FAMILIES:
        return None
    inner, experts = s.intermediate_size, getattr(s, "num_experts_per_tok", 0) or 0
    if experts:
        shared = getattr(s, "shared_expert_intermediate_size", 0) or 0
        inner = experts * getattr(s, "moe_intermediate_size", inner) + shared
    return FlopCounter(
        layers=s.num_hidden_layers,
        hidden=s.hidden_size,
        heads=s.num_attention_heads,
        kv_heads=s.num_key_value_heads,
        head_dim=getattr(s, "head_dim", None) or s.hidden_size // s.num_attention_heads,
        intermediate=inner,
        vocabulary=s.vocab_size,
    )
