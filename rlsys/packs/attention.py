"""Attention over packed sequences, for any Hugging Face decoder.

From position ids alone, transformers would build a dense [T, T] mask. Instead, attention runs on the blocks of a
`Layout`. The completions of a prompt see the keys of the prompt and their own; the prompt itself is computed once.

Models may ask for a sliding window, a soft cap or sinks. What is not computed here is refused by name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlsys.packs import exact
from rlsys.packs.flash import can_flash, flash_attention
from rlsys.packs.layout import AttentionBlock, BlocksToPack, Layout, PackToBlocks
from rlsys.packs.sequence_parallel import exchange_heads

PACKED_ATTENTION = "rlsys_packed"
EXACT_PACKED_ATTENTION = "rlsys_packed_exact"  # computes in the same order as the engine, for `rollout.exact`

# Arguments that models hand on to attention and that change nothing in its result.
HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "seq_idx", "deterministic", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, float], Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # never compiled, even inside compiled layers
@exchange_heads
def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attend: Attend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function for packs.  [1, H, T, D] each -> [1, T, H, D]

    `layout` is a keyword argument of `model(...)`, which transformers passes through. `s_aux` are the sinks [H].
    """
    if layout is None:
        raise ValueError(f"{type(module).__name__} does not tell attention where the sequences of a pack end")
    refuse_unknown(module, others | {"attention_mask": attention_mask})
    refuse_undeclared_window(module, sliding_window, layout)
    refuse_positions_in_pack(module, query.shape[2])
    special = {"a soft cap": softcap is not None, "sinks": s_aux is not None}
    windowed = any(is_windowed(block, sliding_window) for block in layout.blocks)
    masked = windowed or any(block.prefix for block in layout.blocks)
    plain = attend is None and not any(special.values())
    if masked and plain and layout.ragged_keys and can_flash(query, value, dropout):
        return flash_attention(query[0], key[0], value[0], layout.ragged_keys, scaling, sliding_window)[None], None
    if attend is not None:
        refuse_exact(module, special | {"a sliding window": windowed})
    elif any(special.values()):
        attend = partial(attend_by_scores, softcap=softcap, sinks=s_aux)
    queries = heads_by_block(query, layout, with_prefix=False)
    keys, values = (heads_by_block(x, layout, with_prefix=True) for x in (key, value))
    masks = [window_mask(block, sliding_window) for block in layout.blocks]
    outputs = [
        (attend or block_attention)(*inputs, scaling, dropout).transpose(1, 2).flatten(2).flatten(0, 1)
        for inputs in zip(queries, keys, values, masks, strict=True)
    ]
    heads = (query.shape[1], value.shape[3])
    return BlocksToPack.apply(torch.cat(outputs), layout.cell_of_token).unflatten(-1, heads)[None], None


def heads_by_block(x: Tensor, layout: Layout, with_prefix: bool) -> list[Tensor]:
    """Copies queries, keys or values into blocks.  [1, H, T, D] -> per block [n, H, L or prefix + L, D]"""
    cells = PackToBlocks.apply(x[0].transpose(0, 1).flatten(1), layout, with_prefix)
    return [c.unflatten(-1, x.shape[1:4:2]).transpose(1, 2) for c in cells]


def is_windowed(block: AttentionBlock, window: int | None) -> bool:
    """Whether some queries of a block do not see all keys before them."""
    return window is not None and block.tokens.shape[1] > window


def window_mask(block: AttentionBlock, window: int | None) -> Tensor | None:
    """The keys that each query of a block sees, [L, prefix + L]; None: itself and all before it."""
    if window is None or not is_windowed(block, window):
        return block.mask
    return block.causal_mask().triu(block.prefix - window + 1)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse_own_attention(decoder: Any) -> None:
    """Raises if a model computes attention by itself: it would see a pack as one sequence."""
    if not decoder._can_set_attn_implementation():
        raise ValueError(f"transformers cannot replace the attention of {type(decoder).__name__}")


def refuse_unknown(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Raises if a model hands attention something that is not computed here."""
    for name, option in options.items():
        neutral = option is True if name == "is_causal" else option is False
        if option is not None and not neutral and name not in HARMLESS:
            raise ValueError(
                f"{type(module).__name__} hands attention `{name}`, which packed attention does not compute."
            )
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal: its tokens see later ones, which cannot be trained.")


def refuse_undeclared_window(module: torch.nn.Module, window: int | None, layout: Layout) -> None:
    """Raises if a sequence is longer than a window that the layer has and does not hand to attention."""
    declared = declared_window(module)
    if window is None and declared and any(block.tokens.shape[1] > declared for block in layout.blocks):
        raise ValueError(
            f"a sequence is longer than the window of {declared} tokens in the configuration of "
            f"{type(module).__name__}, which gives it to attention as a mask. Packed attention has no mask: "
            "use shorter sequences."
        )


def refuse_positions_in_pack(module: torch.nn.Module, tokens: int) -> None:
    """Raises if a layer without RoPE scales its queries by their place in a pack, as Llama 4's do from a distance on."""
    scales = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    if scales and tokens >= (from_token := getattr(module, "floor_scale", tokens)):
        raise ValueError(
            f"{type(module).__name__} scales queries from token {from_token} of a pack on, whichever sequence they are "
            f"of. Use a policy.tokens_per_pack below {from_token}."
        )


def declared_window(module: torch.nn.Module) -> int | None:
    """The window or chunk that the model's configuration gives a layer."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[index] if kinds and isinstance(index, int) else "unknown"
    if kind == "chunked_attention":
        return int(config.attention_chunk_size)
    if kind not in ("sliding_attention", "unknown") or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def refuse_exact(module: torch.nn.Module, uses: dict[str, bool]) -> None:
    """Raises if a layer uses what the attention of `rollout.exact` does not have."""
    if names := ", ".join(name for name, used in uses.items() if used):
        raise ValueError(f"rollout.exact does not compute {names}, which {type(module).__name__} uses.")


# --- within a block ---------------------------------------------------------------------------------------------------


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention within a block.  [n, H, L, D], [n, H or fewer, prefix + L, D] twice -> [n, H, L, D]"""
    # With a mask or in float32, only a kernel that stores all scores accepts fewer key heads than query heads on a GPU.
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`block_attention` with a soft cap of scores, or with sinks: one more score per head, which takes no value.

    The scores are in memory, and are computed again for gradients.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    arguments = (query, key, value, mask, sinks, scaling, softcap, dropout)
    output: Tensor = checkpoint(weigh_values, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
    return output


def weigh_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """softmax([cap tanh(q kᵀ scaling / cap), sinks]) v, without the weights of the sinks."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


class ExactAttention(torch.autograd.Function):
    """`block_attention`, but with the result of `exact.attend`. The two are equal up to rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        assert not dropout, "exact attention has no dropout"
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scaling = mask, scaling
        (n, heads, length, size), kv_heads, keys = query.shape, key.shape[1], key.shape[2]
        padding = (0, 0, 0, -keys % exact.KEY_BLOCK)
        key, value = (F.pad(x, padding).reshape(n * kv_heads, -1, size) for x in (key, value))
        seen = torch.arange(keys - length + 1, keys + 1).repeat(heads // kv_heads).expand(n * kv_heads, -1)
        out = exact.attend(query.reshape(n * kv_heads, -1, size), key, value, seen, scaling or size**-0.5)
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = block_attention(query, key, value, ctx.mask, ctx.scaling)
        return *torch.autograd.grad(out, (query, key, value), grad), None, None, None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(EXACT_PACKED_ATTENTION, partial(packed_attention, attend=ExactAttention.apply))
