"""A table of well-known models, for a plan without their config.json."""

import re
from dataclasses import replace

from rlsys.models.families import family_of
from rlsys.models.shapes import ModelShape


def _shape(
    family: str, name: str, sizes: tuple[int, int, int, int, int, int, int], *, tied: bool, context: int
) -> ModelShape:
    bias = family_of(family).attention_bias != "none"
    return ModelShape(name, family, *sizes, tied=tied, context=context, qkv_bias=bias)


# layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary
_SHAPES = (
    _shape("qwen2", "builtin:tiny", (2, 128, 4, 4, 32, 256, 13), tied=True, context=64),
    _shape("qwen2", "builtin:untrained", (2, 128, 4, 4, 32, 256, 13), tied=True, context=64),
    _shape("qwen2", "builtin:two_modes", (2, 128, 4, 4, 32, 256, 16), tied=True, context=64),
    _shape("qwen2", "builtin:guess", (2, 128, 4, 4, 32, 256, 36), tied=True, context=64),
    _shape("qwen2", "builtin:calculator", (2, 128, 4, 4, 32, 256, 21), tied=True, context=64),
    _shape("qwen2", "Qwen2.5-0.5B", (24, 896, 14, 2, 64, 4864, 151936), tied=True, context=32768),
    _shape("qwen2", "Qwen2.5-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=True, context=131072),
    _shape("qwen2", "Qwen2.5-3B", (36, 2048, 16, 2, 128, 11008, 151936), tied=True, context=32768),
    _shape("qwen2", "Qwen2.5-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, context=131072),
    _shape("qwen2", "Qwen2.5-14B", (48, 5120, 40, 8, 128, 13824, 152064), tied=False, context=131072),
    _shape("qwen2", "Qwen2.5-32B", (64, 5120, 40, 8, 128, 27648, 152064), tied=False, context=131072),
    _shape("qwen2", "Qwen2.5-72B", (80, 8192, 64, 8, 128, 29568, 152064), tied=False, context=131072),
    _shape("qwen2", "Qwen2.5-Math-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=True, context=4096),
    _shape("qwen2", "Qwen2.5-Math-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, context=4096),
    _shape("qwen2", "DeepSeek-R1-Distill-Qwen-1.5B", (28, 1536, 12, 2, 128, 8960, 151936), tied=False, context=131072),
    _shape("qwen2", "DeepSeek-R1-Distill-Qwen-7B", (28, 3584, 28, 4, 128, 18944, 152064), tied=False, context=131072),
    _shape("qwen3", "Qwen3-0.6B", (28, 1024, 16, 8, 128, 3072, 151936), tied=True, context=40960),
    _shape("qwen3", "Qwen3-1.7B", (28, 2048, 16, 8, 128, 6144, 151936), tied=True, context=40960),
    _shape("qwen3", "Qwen3-4B", (36, 2560, 32, 8, 128, 9728, 151936), tied=True, context=40960),
    _shape("qwen3", "Qwen3-8B", (36, 4096, 32, 8, 128, 12288, 151936), tied=False, context=40960),
    _shape("qwen3", "Qwen3-14B", (40, 5120, 40, 8, 128, 17408, 151936), tied=False, context=40960),
    _shape("qwen3", "Qwen3-32B", (64, 5120, 64, 8, 128, 25600, 151936), tied=False, context=40960),
    replace(
        _shape("qwen3_moe", "Qwen3-30B-A3B", (48, 2048, 32, 4, 128, 768, 151936), tied=False, context=40960),
        experts=128,
        active_experts=8,
    ),
    _shape("llama", "Llama-3.2-1B", (16, 2048, 32, 8, 64, 8192, 128256), tied=True, context=131072),
    _shape("llama", "Llama-3.2-3B", (28, 3072, 24, 8, 128, 8192, 128256), tied=True, context=131072),
    _shape("llama", "Llama-3.1-8B", (32, 4096, 32, 8, 128, 14336, 128256), tied=False, context=131072),
    _shape("llama", "Llama-3.1-70B", (80, 8192, 64, 8, 128, 28672, 128256), tied=False, context=131072),
    _shape("llama", "Llama-3.3-70B", (80, 8192, 64, 8, 128, 28672, 128256), tied=False, context=131072),
    _shape("llama", "SmolLM2-135M", (30, 576, 9, 3, 64, 1536, 49152), tied=True, context=8192),
    _shape("llama", "SmolLM2-360M", (32, 960, 15, 5, 64, 2560, 49152), tied=True, context=8192),
    _shape("llama", "SmolLM2-1.7B", (24, 2048, 32, 32, 64, 8192, 49152), tied=True, context=8192),
    _shape("mistral", "Mistral-7B-v0.3", (32, 4096, 32, 8, 128, 14336, 32768), tied=False, context=32768),
)
KNOWN_SHAPES = {shape.name.lower(): shape for shape in _SHAPES}
BUILTIN_MODELS = [shape.name for shape in _SHAPES if shape.name.startswith("builtin:")]
NAME_SUFFIXES = ("-instruct", "-base", "-it", "-coder", "-thinking", "-2507")  # of models with the same sizes
CONTEXT_BY_NAME = {  # of models whose context differs from that of the model they derive from
    r"qwen2\.5-[\d.]+b-instruct|qwen2\.5-coder-.*|qwen3-.*-base": 32768,
    r"qwen3-.*-2507|qwen3-coder-.*": 262144,
}


def look_up_shape(name: str) -> ModelShape | None:
    """Finds a shape by hub name. Owner and training method do not change the sizes, but may change the context."""
    model = name.rpartition("/")[2].lower().removeprefix("meta-")
    contexts = [tokens for pattern, tokens in CONTEXT_BY_NAME.items() if re.fullmatch(pattern, model)]
    stem = model.replace("-coder-", "-")
    while stem not in KNOWN_SHAPES:
        suffix = next((suffix for suffix in NAME_SUFFIXES if stem.endswith(suffix)), None)
        if suffix is None:
            return None
        stem = stem.removesuffix(suffix)
    shape = replace(KNOWN_SHAPES[stem], name=name)
    return replace(shape, context=contexts[0]) if contexts else shape
