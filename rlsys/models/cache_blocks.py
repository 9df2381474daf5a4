"""How vLLM divides the cache of an engine on GPUs, for models whose layers are of two kinds.

Layers are divided into groups of equal numbers, some of which are padding, and the cache into blocks, each for one group. A
block holds a number of tokens for layers with attention, and one state for mixers.
"""

import math
from dataclasses import dataclass

from rlsys.models.shapes import ModelShape

KERNEL_TOKENS = 16  # a block's tokens are a multiple of this
STATES = 2  # of a sequence, in each layer with a mixer: vLLM keeps the last one for the prefix cache
SIMILAR = 1.5  # below this ratio of layers of both kinds, each kind is one group


@dataclass(frozen=True)
class CacheBlocks:
    """Of a model with mixers. `CacheBlocks(tokens=1056, size=12976128, attention=1, mixers=3)`"""

    tokens: int  # of a block
    size: float  # bytes of a block, on one GPU
    attention: int  # groups
    mixers: int

    def sequence_blocks(self, tokens: float) -> int:
        return self.attention * math.ceil(tokens / self.tokens) + self.mixers * STATES

    def most_sequences(self, cache: float) -> int:
        """Returns how many sequences can be decoded at the same time in a cache, in bytes: each needs a block of each group.

        vLLM does not start with CUDA graphs for more sequences than there are blocks.
        """
        return max(int(cache / self.size // (self.attention + self.mixers)), 1)


def cache_parts(model: ModelShape, gpus: int) -> int:
    """Returns over how many of an engine's GPUs keys and values are divided. A single head is not divided, nor are latent keys."""
    return 1 if model.latent else min(gpus, max(model.kv_heads, 1))


def cache_blocks(model: ModelShape, width: int, gpus: int) -> CacheBlocks:
    """Chooses the tokens of a block so that its keys and values are as large as a state. Numbers have `width` bytes."""
    assert model.mixer
    state, token = model.mixer.state_bytes(width) / gpus, model.cached_width * width / cache_parts(model, gpus)
    tokens = KERNEL_TOKENS * max(math.ceil(state / (KERNEL_TOKENS * token)), 1)
    size = group_size(model.attention_layers, model.mixer_layers)
    attention, mixers = (math.ceil(layers / size) for layers in (model.attention_layers, model.mixer_layers))
    return CacheBlocks(tokens, tokens * token * size, attention, mixers)


def group_size(first: int, second: int) -> int:
    """Returns how many layers a group has, for a model with layers of two kinds."""
    fewer, more = sorted((first, second))
    return more if not fewer or more < SIMILAR * fewer else fewer
