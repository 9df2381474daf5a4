"""Runs the decoder of a Hugging Face model on a pack."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.forward.context import pack_context
from rlsys.forward.sequence_parallel import ALONE, SequenceGroup
from rlsys.forward.transfer import to_device
from rlsys.types import Pack


@dataclass(frozen=True)
class OwnTargets:
    """The targets that this rank predicts: all K of a pack, unless ranks share it."""

    hidden: Tensor  # [k, hidden size] the decoder's last hidden states at the positions that predict them
    indices: Tensor  # [k] among all targets
    count: int  # K
    group: SequenceGroup

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values of all targets, from those that each rank has of its own.  [k, …] -> [K, …]"""
        return self.group.gather(values, self.indices, self.count)


def let_model_find_decoder(lm: Any) -> None:
    """Patch: Llama 4's text model names its decoder `model`, and `get_decoder` looks elsewhere and returns the whole."""
    if lm.get_decoder() is lm and hasattr(lm, "model"):
        lm.base_model_prefix = "model"


def run_decoder(decoder: Any, pack: Pack, device: torch.device) -> OwnTargets:
    """Runs the decoder on this rank's share of a pack."""
    group = pack_context(decoder).group
    targets, places = (to_indices(x, device) for x in group.own_targets(pack.logit_positions, len(pack.tokens)))
    output = decoder(**decoder_inputs(decoder, pack, device))
    return OwnTargets(output.last_hidden_state[0].index_select(0, places), targets, len(pack.targets), group)


def decoder_inputs(decoder: Any, pack: Pack, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of the model's `forward` for a pack.

    Layers hand the layout on to attention. Those that do not, and folded mixers, read it from the context.
    """
    context = pack_context(decoder)
    return {
        "input_ids": to_indices(context.group.own_tokens(pack.tokens), device)[None],
        "position_ids": to_indices(context.group.own_tokens(pack.positions), device)[None],
        "use_cache": False,
        "layout": context.start(pack.lengths, pack.parent, device),
    }


def to_indices(column: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(column, device, torch.long)


@contextmanager
def own_attention(decoder: Any) -> Iterator[None]:
    """Patch: while it is open, the model attends as transformers computes it, for one sequence instead of a pack.

    The packing proof and a diagnosis compare with it.
    """
    packed, compiles = decoder.config._attn_implementation, "torch._dynamo" in sys.modules
    context = pack_context(decoder)
    group, context.group = context.group, ALONE
    decoder.set_attn_implementation("eager")
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        decoder.set_attn_implementation(packed)
        context.group = group
