"""The cache of a rollout engine: bytes of keys, values and states, and how many sequences it has room for.

vLLM divides layers of several kinds into groups of equal numbers of layers, some of which are padding, and the cache into
blocks, each for one group. A block holds a number of tokens for layers with attention, and one state for mixers.
"""

import math
from dataclasses import dataclass

from rlsys.config.schema import Config
from rlsys.estimates.memory import WIDTH
from rlsys.models.shapes import ModelShape

KERNEL_TOKENS = 16  # a block's tokens are a multiple of this
STATES = 2  # of a sequence, in each layer with a mixer: vLLM keeps the last one for the prefix cache
SIMILAR = 1.5  # so many times the layers of one kind: both kinds are one group each


@dataclass(frozen=True)
class CacheBlocks:
    """How vLLM divides the cache of a model with mixers. `CacheBlocks(tokens=1056, size=12976128, attention=1, mixers=3)`"""

    tokens: int  # of a block
    size: float  # bytes of a block, on one GPU
    attention: int  # groups
    mixers: int

    def sequence_blocks(self, tokens: float) -> int:
        return self.attention * math.ceil(tokens / self.tokens) + self.mixers * STATES


def cache_parts(c: Config, model: ModelShape) -> int:
    """Among how many GPUs of an engine keys and values are divided: a head of keys is not, and latent ones are not."""
    return 1 if model.latent else min(c.rollout.tensor_parallel, max(model.kv_heads, 1))


def cached_layer_bytes(c: Config, model: ModelShape) -> float:
    """Bytes of a token's keys and values in one layer, on one GPU."""
    return model.cached_width * WIDTH[c.rollout.dtype] / cache_parts(c, model)


def sequence_bytes(c: Config, model: ModelShape, tokens: float) -> float:
    """What a sequence of so many tokens takes of the cache, on one GPU."""
    if model.mixer:
        blocks = cache_blocks(c, model)
        return blocks.size * blocks.sequence_blocks(tokens)
    full, windowed = model.attention_layers - model.windowed_layers, model.windowed_layers
    if not windowed or c.cluster.device == "cpu":  # where layers with a window keep all tokens
        return cached_layer_bytes(c, model) * (full + windowed) * tokens
    size = group_size(full, windowed)
    kept = math.ceil(full / size) * tokens + math.ceil(windowed / size) * min(tokens, model.window)
    return cached_layer_bytes(c, model) * size * kept


def cache_blocks(c: Config, model: ModelShape) -> CacheBlocks:
    """The blocks of a model with mixers: as many tokens as make keys and values take as much as a state."""
    assert model.mixer
    state = model.mixer.state_bytes(WIDTH[c.rollout.dtype]) / c.rollout.tensor_parallel
    token = cached_layer_bytes(c, model)
    tokens = KERNEL_TOKENS * max(math.ceil(state / (KERNEL_TOKENS * token)), 1)
    size = group_size(model.attention_layers, model.mixer_layers)
    attention, mixers = (math.ceil(layers / size) for layers in (model.attention_layers, model.mixer_layers))
    return CacheBlocks(tokens, tokens * token * size, attention, mixers)


def group_size(first: int, second: int) -> int:
    """Layers of a group, for a model with so many layers of two kinds."""
    fewer, more = sorted((first, second))
    return more if not fewer or more < SIMILAR * fewer else fewer
