"""What a forward or backward pass over a pack holds in memory, in the worst case: all completions at maximum length."""

import math
from dataclasses import dataclass

from rlsys.config.schema import Config
from rlsys.estimates.memory import WIDTH, Parts, SequenceLengths
from rlsys.models.shapes import ModelShape

PADDING_FACTOR = 1.1  # cells of attention's blocks over the tokens in them
# On CPU the allocator keeps freed pieces: memory held over memory in use. Measured; with ZeRO 3 it keeps more, compiled
# layers allocate fewer pieces.
MALLOC, MALLOC_ZERO_3, MALLOC_COMPILED = 1.75, 2.0, 1.35


def worst_case_pack(c: Config, lengths: SequenceLengths, samples: int, ranks: int) -> tuple[float, float]:
    """Tokens of a pack when `samples` are dealt to `ranks`, and how many of those tokens are scored.

    Every rank has the same number of packs.
    """
    prompts = max(samples / c.trainer.samples_per_prompt, 1)
    whole = prompts * lengths.prompt + samples * lengths.completion
    packs = -(-math.ceil(whole / c.policy.tokens_per_pack) // ranks) * ranks
    tokens = min(max(whole / packs, lengths.prompt + lengths.completion), whole)
    return tokens, tokens * samples * lengths.completion / whole


def attention_cells(c: Config, lengths: SequenceLengths) -> float:
    """Keys in attention's blocks per token of a pack: the prompt's keys are repeated before each of its completions."""
    group = c.trainer.samples_per_prompt
    tokens = lengths.prompt + group * lengths.completion
    return PADDING_FACTOR * (lengths.prompt + group * (lengths.prompt + lengths.completion)) / tokens


def share_pack(c: Config, lengths: SequenceLengths, samples: int, ranks: int) -> tuple[float, float]:
    """What one rank computes of a `worst_case_pack` with policy.sequence_parallel."""
    sharing = c.policy.sequence_parallel
    tokens, scored = worst_case_pack(c, lengths, samples, ranks // sharing)
    return tokens / sharing, min(tokens / sharing, scored)


def way_of_attention(c: Config, model: ModelShape) -> str:
    """The entry of `rlsys.packs.attention.ATTENTION` that packs take. Sinks are not known here."""
    if model.caps_scores:
        return "flex" if c.cluster.device == "gpu" else "scores"
    on_gpu = c.cluster.device == "gpu" and WIDTH[c.policy.dtype] == 2
    return "flash" if on_gpu and c.trainer.samples_per_prompt > 1 else "blocks"


def saved_activation_bytes(
    model: ModelShape, width: int, cells: float, compiled: bool = False, sharing: int = 1, way: str = "blocks"
) -> float:
    """Bytes per token that a layer keeps for the backward pass. A compiled layer computes norms and gates again.

    Counted with torch's hooks for saved tensors; tests/rlsys/estimates compares. `sharing` ranks that share a pack have
    as many heads of keys together, if need be repeated.
    """
    h, q, kv, i = model.hidden, model.query_width, model.key_width, model.flop_counter.intermediate
    kv_heads = max(model.kv_heads, sharing) * model.head_dim
    q_cells, kv_cells = PADDING_FACTOR * q, 2 * cells * kv_heads  # queries, keys and values, in blocks
    if way == "scores":  # attention is computed again
        attention = width * (q + q_cells + kv_cells) + 8
    elif way == "flex":  # all is that of the pack
        attention = width * 2 * (q + kv_heads) + 4 * model.heads
    elif way == "flash":  # its output is that of the pack
        attention = width * (2 * q + kv_cells / PADDING_FACTOR) + 4 * model.heads
    else:  # and outputs
        attention = width * (q + 2 * q_cells + kv_cells) + 4 * model.heads + 8
    if compiled:
        return attention + width * (3 * i + 4 * h + (q + kv) * model.has_qk_norm)
    normed = model.layer_norms * h + (q + kv) * (model.has_qk_norm or model.family == "olmo2")
    return attention + width * (4 * i + 2 * h) + norm_bytes(model, width) * normed


def norm_bytes(model: ModelShape, width: int) -> int:
    """Bytes that a norm keeps of a number: itself in float32, and normalized, in float32 for a weight that is."""
    weighs_in_float32 = width == 4 or model.family in ("gemma", "gemma2", "gemma3_text", "olmo2")
    return 4 + (4 if weighs_in_float32 else width)


def transient_bytes(width: int, model: ModelShape, tokens: float, training: bool) -> float:
    """Bytes of a layer's temporaries while it computes. In training, `saved_activation_bytes` counts some of them."""
    return tokens * width * ((2.0 if training else 4.0) * model.flop_counter.intermediate + 4 * model.hidden)


def logit_bytes(c: Config, model: ModelShape, scored: float, training: bool) -> float:
    """Bytes of a chunk's logits and what is computed from them; in training also the output layer's gradient."""
    chunk = min(c.policy.logprob_chunk, scored) * model.vocabulary
    low = WIDTH[c.policy.dtype] == 2
    copy = 4.0 * model.embedding_parameters * (low and c.policy.head_dtype == "float32")
    if not training:
        return 8 * chunk + copy
    return copy + head_gradient_bytes(c, model, scored, chunk)


def head_gradient_bytes(c: Config, model: ModelShape, scored: float, chunk: float) -> float:
    """What `ChunkedLogprobs` holds in training: per hidden state, logit of a chunk, and weight.

    A chunk's logits become log-probs and their gradient in place, in float32, beside the head's type before and after.
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
        saved_by_layer = tokens * saved_activation_bytes(
            model,
            width,
            attention_cells(c, lengths),
            c.policy.compile,
            c.policy.sequence_parallel,
            way_of_attention(c, model),
        )
        if c.policy.gradient_checkpointing:  # a layer's activations are computed again in the backward pass
            inputs = 2 if offloads_activations(c) else model.layers  # that are on the device
            saved, layer = inputs * tokens * width * model.hidden, layer + saved_by_layer
        else:
            saved = model.layers * saved_by_layer
        normed = last_norm_bytes(model, width, tokens, scored) * (c.cluster.device == "gpu")
    return PassMemory(saved, normed, layer, logits, allocator_overhead(c, training))


def last_norm_bytes(model: ModelShape, width: int, tokens: float, scored: float) -> float:
    """What the norm after the last layer saves: its input in float32, the normalized input, and the scored results."""
    return (norm_bytes(model, width) * tokens + width * scored) * model.hidden


def offloads_activations(c: Config) -> bool:
    return c.policy.offload_activations and c.cluster.device == "gpu"


def offloaded_bytes(c: Config, model: ModelShape, tokens: float) -> float:
    """Bytes of the layers' inputs in host memory. torch rounds pinned memory up to a power of two."""
    return model.layers * 2.0 ** math.ceil(math.log2(max(tokens * WIDTH[c.policy.dtype] * model.hidden, 1)))


def allocator_overhead(c: Config, training: bool) -> float:
    """Memory held over memory in use; torch's allocator for GPUs is taken to be exact."""
    if c.cluster.device != "cpu":
        return 1.0
    if training and c.policy.zero_stage == 3:
        return MALLOC_ZERO_3
    return MALLOC_COMPILED if c.policy.compile else MALLOC
