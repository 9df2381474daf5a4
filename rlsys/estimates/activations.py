"""What a forward or backward pass over a pack holds in memory, in the worst case: all completions at maximum length."""

import math

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


def saved_activation_bytes(
    model: ModelShape, width: int, cells: float, compiled: bool = False, sharing: int = 1
) -> float:
    """Bytes per token that a layer keeps for the backward pass. A compiled layer computes norms and gates again.

    Counted with torch's hooks for saved tensors; tests/rlsys/estimates compares. `sharing` ranks that share a pack have
    as many heads of keys together, if need be repeated.
    """
    h, q, kv, i = model.hidden, model.query_width, model.key_width, model.flop_counter.intermediate
    kv_heads = max(model.kv_heads, sharing) * model.head_dim
    q_cells, kv_cells = 2 * PADDING_FACTOR * q, 2 * cells * kv_heads  # queries and outputs, keys and values, in blocks
    attention = width * (q + q_cells + kv_cells) + 4 * model.heads + 8
    head_norms = (q + kv) * model.has_qk_norm
    if compiled:
        return attention + width * (3 * i + 4 * h + head_norms)
    return attention + width * 4 * i + (24 if width == 4 else 16) * h + (8 if width == 4 else 6) * head_norms


def transient_bytes(width: int, model: ModelShape, tokens: float, training: bool) -> float:
    """Bytes of a layer's temporaries while it computes. In training, `saved_activation_bytes` counts some of them."""
    return tokens * width * ((2.0 if training else 4.0) * model.flop_counter.intermediate + 4 * model.hidden)


def logit_bytes(c: Config, model: ModelShape, scored: float, training: bool) -> float:
    """Bytes of a chunk's logits and what is computed from them; in training also the output layer's gradient."""
    chunk = min(c.policy.logprob_chunk, scored) * model.vocabulary
    low = WIDTH[c.policy.dtype] == 2
    copy = 4.0 * model.embedding_parameters * (low and c.policy.head_dtype == "float32")
    if not training:
        return 12 * chunk + copy
    gradient = model.embedding_parameters * (10 if low else 8) * (c.policy.lora.rank == 0)  # else it is frozen
    return (24 if c.entropy.coef else 20) * chunk + gradient + copy


def forward_parts(
    c: Config,
    model: ModelShape,
    tokens: float,
    scored: float,
    lengths: SequenceLengths,
    *,
    training: bool,
    has_logits: bool = True,
) -> Parts:
    """What a pass over a pack holds. A layer and the output layer never compute at the same time: the larger counts."""
    width = WIDTH[c.policy.dtype]
    layer = transient_bytes(width, model, tokens, training)
    logits = logit_bytes(c, model, scored, training) * has_logits
    saved = 0.0
    if training:
        saved_by_layer = tokens * saved_activation_bytes(
            model, width, attention_cells(c, lengths), c.policy.compile, c.policy.sequence_parallel
        )
        if c.policy.gradient_checkpointing:  # a layer's activations are computed again in the backward pass
            inputs = 2 if offloads_activations(c) else model.layers  # that are on the device
            saved, layer = inputs * tokens * width * model.hidden, layer + saved_by_layer
        else:
            saved = model.layers * saved_by_layer
    overhead = allocator_overhead(c, training)
    if logits > layer:
        return {"activations": saved * overhead, "logits": logits}
    return {"activations": (saved + layer) * overhead}


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
