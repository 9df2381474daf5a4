"""Attention over packed sequences, for any Hugging Face decoder.

From position ids alone, transformers would build a dense [T, T] mask. Here the completions of a prompt see the keys of
the prompt and their own; the prompt itself is computed once. `ATTENTION` names the ways to compute that.

Models may ask for a sliding window, a soft cap or sinks. What is not computed here is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlsys.errors import ConfigError
from rlsys.forward.block_attention import (
    BlockKernel,
    ExactAttention,
    attend_by_blocks,
    attend_by_scores,
    block_attention,
    is_windowed,
)
from rlsys.forward.context import PackContext
from rlsys.forward.flash import can_flash, flash_attention
from rlsys.forward.flex import attend_by_flex, can_flex
from rlsys.forward.heads import sequence_parallel_problem
from rlsys.forward.layout import Layout

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


@dataclass(frozen=True)
class Heads:
    """What a layer hands attention: heads of a whole pack, and how to compute with them."""

    query: Tensor  # [1, H, T, D]
    key: Tensor  # [1, H or fewer, T, D]
    value: Tensor  # [1, H or fewer, T, D]
    layout: Layout
    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [H]
    exact: bool

    @property
    def plain(self) -> bool:
        """Whether the scores are those of ordinary attention."""
        return self.softcap is None and self.sinks is None

    @property
    def windowed(self) -> bool:
        """Whether some queries do not see all keys before them."""
        return any(is_windowed(block, self.window) for block in self.layout.blocks)

    @property
    def masked(self) -> bool:
        """Whether attention is not just causal within each piece."""
        return self.windowed or any(block.prefix for block in self.layout.blocks)


def by_flash(heads: Heads) -> Tensor:
    assert heads.layout.ragged_keys
    q, k, v = heads.query[0], heads.key[0], heads.value[0]
    return flash_attention(q, k, v, heads.layout.ragged_keys, heads.scaling, heads.window)[None]


def by_flex(heads: Heads) -> Tensor:
    h = heads
    return attend_by_flex(h.query, h.key, h.value, h.layout.paths, h.scaling, h.window, h.softcap, h.sinks)


def by_blocks(heads: Heads, kernel: BlockKernel = block_attention) -> Tensor:
    h = heads
    return attend_by_blocks(h.query, h.key, h.value, h.layout, h.scaling, h.dropout, h.window, kernel)


def by_scores(heads: Heads) -> Tensor:
    return by_blocks(heads, partial(attend_by_scores, softcap=heads.softcap, sinks=heads.sinks))


def by_exact_sums(heads: Heads) -> Tensor:
    return by_blocks(heads, ExactAttention.apply)


def flash_computes(heads: Heads) -> bool:
    """Prefers, where no mask is needed, PyTorch's own attention on blocks, which is as fast or faster (tests/gpu/results)."""
    usable = heads.layout.ragged_keys is not None and can_flash(heads.query, heads.value, heads.dropout)
    return usable and heads.plain and heads.masked


# name → whether it computes what a layer hands over, and how. The first that does is taken.
ATTENTION: dict[str, tuple[Callable[[Heads], bool], Callable[[Heads], Tensor]]] = {
    "exact": (lambda heads: heads.exact, by_exact_sums),  # on CPU, with `rollout.exact`
    "flash": (flash_computes, by_flash),  # on GPUs: shared prompts, windows
    "flex": (
        lambda heads: not heads.plain and can_flex(heads.query, heads.value, heads.dropout),
        by_flex,
    ),  # on GPUs: caps, sinks
    "scores": (lambda heads: not heads.plain, by_scores),  # on CPU: caps, sinks
    "blocks": (lambda heads: True, by_blocks),
}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # never compiled, even inside compiled layers
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
    exact: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replaces transformers' attention function for packs.  [1, H, T, D] each -> [1, T, H, D]

    `layout` is a keyword argument of `model(...)`, which transformers passes through. Some models do not hand it on; then
    it is the context's. `s_aux` are the sinks [H].
    """
    packs: PackContext | None = vars(module).get("packs")
    if layout is None and packs:
        layout = packs.layout
    if layout is None:
        raise ValueError(f"{type(module).__name__} does not tell attention where the sequences of a pack end")
    refuse_unknown(module, others | {"attention_mask": attention_mask})
    refuse_undeclared_window(module, sliding_window, layout)
    refuse_positions_in_pack(module, len(layout.cell_of_token))
    if packs:
        packs.windows[module] = None if exact else sliding_window
    heads = Heads(query, key, value, layout, scaling, dropout, sliding_window, softcap, s_aux, exact)
    refuse_inexact(module, heads)
    if layout.group.ranks > 1:
        return layout.group.tokens_of(attend(exchange_tokens(module, heads))), None
    return attend(heads), None


def attend(heads: Heads) -> Tensor:
    return next(compute for computes, compute in ATTENTION.values() if computes(heads))(heads)


def exchange_tokens(module: torch.nn.Module, heads: Heads) -> Heads:
    """Turns all heads of this rank's share of a pack into a part of the heads of the whole pack."""
    group, tokens, sinks = heads.layout.group, len(heads.layout.cell_of_token), heads.sinks
    name, count, kv_count = type(module).__name__, heads.query.shape[1], heads.key.shape[1]
    if problem := sequence_parallel_problem(name, count, kv_count, group.ranks):
        raise ConfigError(problem)
    query, key, value = (group.heads_of(x, tokens) for x in (heads.query, heads.key, heads.value))
    own_sinks = None if sinks is None else sinks.chunk(group.ranks)[group.rank]
    return replace(heads, query=query, key=key, value=value, sinks=own_sinks)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse_own_attention(decoder: Any) -> None:
    """Raises if a model computes attention by itself: it would see a pack as one sequence."""
    if not hasattr(decoder, "_can_set_attn_implementation"):
        raise ValueError(
            f"transformers does not say which of its modules is the decoder, but names a {type(decoder).__name__}"
        )
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
    """Returns the window or chunk that the model's configuration gives a layer."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[index] if kinds and isinstance(index, int) else "unknown"
    if kind == "chunked_attention":
        return int(config.attention_chunk_size)
    if kind not in ("sliding_attention", "unknown") or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def refuse_inexact(module: torch.nn.Module, heads: Heads) -> None:
    """Raises if a layer uses what the attention of `rollout.exact` does not have."""
    uses = {
        "a soft cap": heads.softcap is not None,
        "sinks": heads.sinks is not None,
        "a sliding window": heads.windowed,
    }
    if heads.exact and (names := ", ".join(name for name, used in uses.items() if used)):
        raise ValueError(f"rollout.exact does not compute {names}, which {type(module).__name__} uses. Use false.")


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(EXACT_PACKED_ATTENTION, partial(packed_attention, exact=True))
