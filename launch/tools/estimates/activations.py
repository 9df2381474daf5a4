"""What a forward or backward pass over a pack holds in memory, in the worst case: all completions at maximum length."""

import math
from dataclasses import dataclass

from launch.tools.estimates.memory import WIDTH, Parts, SequenceLengths
from rlsys.config.derived import logprob_chunk
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape

PADDING_FACTOR = 1.1  # cells of attention's blocks over the tokens in them
MALLOC = 2.0  # on CPU: memory held over memory in use, for the allocator keeps freed pieces. Measured: 1.35 to 2


def worst_case_pack(
    c: Config, model: ModelShape, lengths: SequenceLengths, samples: int, ranks: int
) -> tuple[float, float]:
    """Returns how many tokens a pack has when `samples` are dealt to `ranks`, and how many of them are scored.

    Every rank has the same number of packs.
    """
    prompts = samples if model.mixer else max(samples / c.trainer.samples_per_prompt, 1)
    whole = prompts * lengths.prompt + samples * lengths.completion
    packs = -(-math.ceil(whole / c.policy.tokens_per_pack) // ranks) * ranks
    tokens = min(max(whole / packs, lengths.prompt + lengths.completion), whole)
    return tokens, tokens * samples * lengths.completion / whole


def attention_cells(c: Config, model: ModelShape, lengths: SequenceLengths) -> float:
    """Returns how many keys attention's blocks have per token of a pack: a shared prompt's keys are repeated before each of its completions."""
    if model.mixer:
        return PADDING_FACTOR
    group = c.trainer.samples_per_prompt
    tokens = lengths.prompt + group * lengths.completion
    return PADDING_FACTOR * (lengths.prompt + group * (lengths.prompt + lengths.completion)) / tokens


def share_pack(c: Config, model: ModelShape, lengths: SequenceLengths, samples: int, ranks: int) -> tuple[float, float]:
    """Returns what one rank computes of a `worst_case_pack` with policy.sequence_parallel."""
    sharing = c.policy.sequence_parallel
    tokens, scored = worst_case_pack(c, model, lengths, samples, ranks // sharing)
    return tokens / sharing, min(tokens / sharing, scored)


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that layers of each kind keep for the backward pass. A compiled layer computes norms and gates again.

    Tests compare them with torch's count. Attention is that over blocks; other ways keep a little less. `sharing` ranks that
    share a pack have as many heads of keys together, if need be repeated. `cells`: of `attention_cells`.
    """

    model: ModelShape
    width: int
    cells: float
    compiled: bool = False
    sharing: int = 1

    @property
    def mean(self) -> float:
        """Of a layer, on average over all."""
        m = self.model
        mixing = m.attention_layers * self.attention + m.mixer_layers * self.mixer
        moe = m.expert_layers * self.experts + (m.layers - m.expert_layers) * self.dense_mlp
        return (mixing + moe) / m.layers + self.norms

    @property
    def largest(self) -> float:
        m = self.model
        mixing = max(self.attention, self.mixer) if not m.mixes_beside_attention else self.attention + self.mixer
        return mixing + (max(self.experts, self.dense_mlp) if m.experts else self.dense_mlp) + self.norms

    @property
    def attention(self) -> float:
        m, width = self.model, self.width
        heads = max(m.kv_heads, self.sharing)
        q, out, kv = m.query_width, m.heads * m.value_dim, heads * (m.head_dim + m.value_dim)
        kept = width * (out + PADDING_FACTOR * (q + out) + self.cells * kv) + 4 * m.heads + 8
        if m.latent:
            return kept + (norm_bytes(m, width) + width) * m.latent.norms
        kept += 3 * width * q * m.facts.gates_attention
        normed = (q + m.key_width) * (m.facts.qk_norm != "none")
        return kept + (width if self.compiled else norm_bytes(m, width)) * normed

    @property
    def mixer(self) -> float:
        return PADDING_FACTOR * self.model.mixer.saved_bytes[self.width] if self.model.mixer else 0.0

    @property
    def dense_mlp(self) -> float:
        return self.width * (3 if self.compiled else 4) * (self.model.dense_intermediate or self.model.intermediate)

    @property
    def experts(self) -> float:
        """Each expert has its own inputs and outputs. GPT-OSS clamps and shifts what it multiplies."""
        m = self.model
        products = 7 if m.facts.biased_experts else 3 if self.compiled else 4
        copies = 2 * m.active_experts * m.hidden
        gate = m.hidden * m.facts.gates_shared_expert
        kept = self.width * (copies + products * m.active_experts * m.intermediate + 4 * m.shared_intermediate + gate)
        routes_in_float32 = self.width == 2 and m.facts.routes_in_float32
        return kept + 8 * m.experts + 4 * m.hidden * routes_in_float32

    @property
    def norms(self) -> float:
        """Inputs of attention and MLP, and what norms keep."""
        m = self.model
        if self.compiled:
            return self.width * 4.0 * m.hidden
        return (2 * self.width + norm_bytes(m, self.width) * m.facts.layer_norms) * m.hidden


def norm_bytes(model: ModelShape, width: int) -> int:
    """Returns the bytes that a norm keeps of a number: itself in float32, and normalized, in float32 for a weight that is."""
    return 8 if model.facts.float32_norms else 4 + width


def transient_bytes(width: int, model: ModelShape, tokens: float, training: bool) -> float:
    """Returns the bytes of a layer's temporaries while it computes. In training, `saved_activation_bytes` counts some of them."""
    return tokens * width * ((2.0 if training else 4.0) * model.active_intermediate + 4 * model.hidden)


def logit_bytes(c: Config, model: ModelShape, scored: float, training: bool) -> float:
    """Returns the bytes of a chunk's logits and what is computed from them; in training also the output layer's gradient."""
    chunk = min(logprob_chunk(model.vocabulary), scored) * model.vocabulary
    low = WIDTH[c.policy.dtype] == 2
    copy = 4.0 * model.embedding_parameters * (low and c.policy.head_dtype == "float32")
    if not training:
        return 8 * chunk + copy
    return copy + head_gradient_bytes(c, model, scored, chunk)


def head_gradient_bytes(c: Config, model: ModelShape, scored: float, chunk: float) -> float:
    """Returns what `ChunkedLogprobs` holds in training: per hidden state, logit of a chunk, and weight.

    A chunk's logits become log-probs and their gradient in place, in float32, next to the head's type before and after.
    With the entropy's gradient, log-probs, probabilities and gradient are there together. The weight's gradient is a
    float32 sum, to which a chunk adds a gradient in the head's type; a CPU first makes a float32 copy of it. With a soft
    cap of logits, there is its slope too.
    """
    width = 4 if c.policy.head_dtype == "float32" else WIDTH[c.policy.dtype]
    weight = float(model.embedding_parameters) * (c.policy.lora.rank == 0)  # else it is frozen
    logit = (12 if c.entropy.coef else 4 + width % 4) + 4 * model.caps_logits
    added = 4 + width + 4 * (width == 2 and c.cluster.device == "cpu")
    at_most = max(logit * chunk + 4 * weight, width * chunk + added * weight)
    return width * scored * model.hidden + at_most


@dataclass(frozen=True)
class PassMemory:
    """Bytes of a pass over a pack. A layer and the output layer never compute at the same time."""

    saved: float  # by layers, for the backward pass
    normed: float  # by the norm behind them, until the output layer's gradient is there
    layer: float  # while a layer computes
    logits: float  # while the output layer computes
    overhead: float  # of the allocator, for activations

    @property
    def at_output_layer(self) -> Parts:
        return {"activations": (self.saved + self.normed) * self.overhead, "logits": self.logits}

    @property
    def largest(self) -> Parts:
        if self.logits > self.layer:
            return self.at_output_layer
        return {"activations": (self.saved + self.layer) * self.overhead}


def pass_memory(
    c: Config,
    model: ModelShape,
    tokens: float,
    scored: float,
    lengths: SequenceLengths,
    *,
    training: bool,
    has_logits: bool = True,
) -> PassMemory:
    width = WIDTH[c.policy.dtype]
    layer = transient_bytes(width, model, tokens, training)
    logits = logit_bytes(c, model, scored, training) * has_logits
    saved = normed = 0.0
    if training:
        layers = LayerActivations(
            model,
            width,
            attention_cells(c, model, lengths),
            c.policy.compile,
            c.policy.sequence_parallel,
        )
        if c.policy.gradient_checkpointing:  # a layer's activations are computed again in the backward pass
            inputs = 2 if offloads_activations(c) else model.layers  # that are on the device
            saved, layer = inputs * tokens * width * model.hidden, layer + tokens * layers.largest
        else:
            saved = model.layers * tokens * layers.mean
        normed = last_norm_bytes(model, width, tokens, scored) * (c.cluster.device == "gpu")
    overhead = MALLOC if c.cluster.device == "cpu" else 1.0  # torch's allocator for GPUs is taken to be exact
    return PassMemory(saved, normed, layer, logits, overhead)


def last_norm_bytes(model: ModelShape, width: int, tokens: float, scored: float) -> float:
    """Returns what the norm after the last layer saves: its input in float32, the normalized input, and the scored results."""
    return (norm_bytes(model, width) * tokens + width * scored) * model.hidden


def offloads_activations(c: Config) -> bool:
    return "activations" in c.policy.offload and c.cluster.device == "gpu"


def offloaded_bytes(c: Config, model: ModelShape, tokens: float) -> float:
    """Returns the bytes of the layers' inputs in host memory. torch rounds pinned memory up to a power of two."""
    return model.layers * 2.0 ** math.ceil(math.log2(max(tokens * WIDTH[c.policy.dtype] * model.hidden, 1)))
