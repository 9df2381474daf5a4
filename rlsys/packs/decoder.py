"""Runs the decoder of a Hugging Face model on a pack."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlsys.packs.layout import build_layout
from rlsys.types import Pack


def target_hidden_states(decoder: Any, pack: Pack, device: torch.device) -> Tensor:
    """The decoder's last hidden states at the positions that predict the targets of a pack.  [K, hidden size]"""
    output = decoder(**decoder_inputs(decoder, pack, device))
    return output.last_hidden_state[0].index_select(0, logit_positions(pack, device))


def decoder_inputs(decoder: Any, pack: Pack, device: torch.device) -> dict[str, Any]:
    """The arguments of the model's `forward` for a pack.

    Attention gets the layout as an argument. Folded mixers read it from the decoder, also when a layer is computed again
    for its gradients: until the next pack it stays the same.
    """
    decoder.pack_layout = build_layout(pack.lengths, pack.parent, device)
    return {
        "input_ids": torch.tensor(pack.tokens, dtype=torch.long, device=device)[None],
        "position_ids": torch.tensor(pack.positions, device=device)[None],
        "use_cache": False,
        "layout": decoder.pack_layout,
    }


def logit_positions(pack: Pack, device: torch.device) -> Tensor:
    return torch.tensor(pack.logit_positions, dtype=torch.long, device=device)


@contextmanager
def own_attention(decoder: Any) -> Iterator[None]:
    """Patch: while it is open, the model attends as transformers computes it, for one sequence instead of a pack.

    The packing proof and a diagnosis compare with it.
    """
    packed, compiles = decoder.config._attn_implementation, "torch._dynamo" in sys.modules
    decoder.set_attn_implementation("eager")
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        decoder.set_attn_implementation(packed)
