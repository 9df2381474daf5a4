"""Mixers, which mix along the sequence and are no attention: gated delta networks, Mamba 2, short convolutions.

An engine keeps no keys and values of them. It keeps a state of a fixed size for each sequence. `saved_bytes` are
coefficients that were fitted to what torch counts while transformers computes a mixer without other libraries.
"""

from dataclasses import dataclass
from typing import Any

Sizes = tuple[tuple[str, int, int], ...]  # name, inputs and outputs of each linear layer


@dataclass(frozen=True)
class Mixer:
    """The mixer of a layer. A short convolution of LFM2-1.2B:

    Mixer("short convolutions", (("in_proj", 2048, 6144), ("out_proj", 2048, 2048)), others=6144, flops=16384.0,
          heads=2048, kept=4096, state=0, saved_bytes={2: 24576.0, 4: 49152.0})
    """

    name: str
    linear: Sizes
    others: int  # parameters that are not in linear layers
    flops: float  # of a token, without the linear layers
    heads: int  # among which an engine with tensor parallelism divides it
    kept: int  # inputs of its convolution that an engine keeps
    state: int  # numbers of its state
    saved_bytes: dict[int, float]  # that a token keeps for the backward pass, by the width of its numbers
    state_width: int = 0  # bytes of such a number; 0: as many as of the engine's others

    @property
    def parameters(self) -> int:
        return self.others + sum(inputs * outputs for _, inputs, outputs in self.linear)

    def state_bytes(self, width: int) -> int:
        return self.kept * width + self.state * (self.state_width or width)


def gated_delta_net(s: dict[str, Any], fused: bool = False) -> Mixer:
    """Describes the layer of Yang et al. 2024, arXiv 2412.06464, as Qwen3.5 has it, or `fused`, as Qwen3-Next does."""
    hidden, kernel = int(s["hidden_size"]), int(s.get("linear_conv_kernel_dim", 4))
    key_heads, value_heads = int(s.get("linear_num_key_heads", 16)), int(s.get("linear_num_value_heads", 32))
    key_dim, value_dim = int(s.get("linear_key_head_dim", 128)), int(s.get("linear_value_head_dim", 128))
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed, state = 2 * keys + values, values * key_dim
    inputs: Sizes = (
        (("in_proj_qkvz", hidden, mixed + values), ("in_proj_ba", hidden, 2 * value_heads))
        if fused
        else (
            ("in_proj_qkv", hidden, mixed),
            ("in_proj_z", hidden, values),
            ("in_proj_b", hidden, value_heads),
            ("in_proj_a", hidden, value_heads),
        )
    )
    return Mixer(
        "linear attention",
        (*inputs, ("out_proj", values, hidden)),
        others=kernel * mixed + 2 * value_heads + value_dim,
        flops=2.0 * kernel * mixed + 6 * state,  # the state is read for a key and a query, and changed
        heads=key_heads,
        kept=(kernel - 1) * mixed,
        state=state,
        saved_bytes={
            2: 8 * keys + 34 * values + 32 * value_heads * key_dim + 1318 * value_heads + state / 16,
            4: 28 * keys + 44 * values + 41 * value_heads * key_dim + 1376 * value_heads + state / 16,
        },
        state_width=4 * (s.get("mamba_ssm_dtype") == "float32"),
    )


def mamba2(s: dict[str, Any], falcon: bool = False) -> Mixer:
    """Describes the layer of Dao and Gu 2024, arXiv 2405.21060, as Granite 4 and Falcon-H1 have it."""
    hidden, kernel = int(s["hidden_size"]), int(s.get("mamba_d_conv", 4))
    heads, groups, size = int(s["mamba_n_heads"]), int(s.get("mamba_n_groups", 1)), int(s["mamba_d_state"])
    own_width = s.get("mamba_d_ssm", 1024) if falcon else None
    inner = int(own_width or s.get("mamba_expand", 2) * hidden)
    mixed = inner + 2 * groups * size
    out_bias = s.get("projectors_bias" if falcon else "mamba_proj_bias", False)
    biases = mixed * s.get("mamba_conv_bias", True) + hidden * out_bias
    biases += (inner + mixed + heads) * s.get("mamba_proj_bias", False)
    chunk = int(s.get("mamba_chunk_size", 256))
    chunked = heads * (66 + 12 * chunk + 20 * size) + 8 * inner * size / chunk
    norm = inner * (s.get("mamba_rms_norm", False) if falcon else True)
    return Mixer(
        "Mamba",
        (("in_proj", hidden, inner + mixed + heads), ("out_proj", inner, hidden)),
        others=int(kernel * mixed + biases + 3 * heads + norm),
        flops=2.0 * kernel * mixed + 4 * inner * size,
        heads=heads,
        kept=(kernel - 1) * mixed,
        state=inner * size,
        saved_bytes={
            2: (44 if norm else 30) * inner + 32 * groups * size + chunked,
            4: (48 if norm else 40) * inner + 48 * groups * size + chunked,
        },
    )


def short_convolution(s: dict[str, Any]) -> Mixer:
    """Describes a convolution between two gates, as LFM2 has it."""
    hidden, kernel = int(s["hidden_size"]), int(s.get("conv_L_cache", 3))
    return Mixer(
        "short convolutions",
        (("in_proj", hidden, 3 * hidden), ("out_proj", hidden, hidden)),
        others=kernel * hidden + 5 * hidden * bool(s.get("conv_bias")),
        flops=2.0 * (kernel + 1) * hidden,
        heads=hidden,
        kept=(kernel - 1) * hidden,
        state=0,
        saved_bytes={width: 6.0 * width * hidden for width in (2, 4)},
    )
