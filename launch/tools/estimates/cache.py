"""What sequences take of the cache of a rollout engine: keys, values and states."""

import math

from launch.tools.estimates.memory import WIDTH
from rlsys.config.schema import Config
from rlsys.models.cache_blocks import CacheBlocks, cache_blocks, cache_parts, group_size
from rlsys.models.shapes import ModelShape


def engine_blocks(c: Config, model: ModelShape) -> CacheBlocks:
    return cache_blocks(model, WIDTH[c.rollout.dtype], c.rollout.tensor_parallel)


def sequence_bytes(c: Config, model: ModelShape, tokens: float) -> float:
    """Returns what a sequence of this many tokens takes of the cache, on one GPU."""
    if model.mixer:
        blocks = engine_blocks(c, model)
        return blocks.size * blocks.sequence_blocks(tokens)
    layer = model.cached_width * WIDTH[c.rollout.dtype] / cache_parts(model, c.rollout.tensor_parallel)
    full, windowed = model.attention_layers - model.windowed_layers, model.windowed_layers
    if not windowed or c.cluster.device == "cpu":  # where layers with a window keep all tokens
        return layer * (full + windowed) * tokens
    size = group_size(full, windowed)
    kept = math.ceil(full / size) * tokens + math.ceil(windowed / size) * min(tokens, model.window)
    return layer * size * kept
