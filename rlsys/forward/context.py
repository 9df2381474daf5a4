"""What a decoder's modules have to know of the pack that passes through them: one `PackContext` for all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlsys.errors import ConfigError
from rlsys.forward.layout import Layout, build_layout
from rlsys.forward.sequence_parallel import ALONE, SequenceGroup


@dataclass(eq=False)
class PackContext:
    """Until the next pack it stays the same, so layers that are computed again for their gradients find it."""

    layout: Layout | None = None  # of the present pack
    group: SequenceGroup = ALONE  # ranks that compute each pack together
    mixers: list[str] = field(default_factory=list)  # classes of the modules that run on blocks
    largest_on_ranks: Callable[[int], int] | None = None  # of a number that each rank has
    runs: int = 0  # of each mixer for the present pack, at least
    windows: dict[nn.Module, int | None] = field(default_factory=dict)  # that layers handed to attention last

    def start(self, lengths: list[int], parents: list[int], device: torch.device) -> Layout:
        """Lays out the next pack."""
        self.layout = build_layout(lengths, parents, device, self.group)
        if self.mixers and self.largest_on_ranks:
            self.runs = self.largest_on_ranks(len(self.layout.blocks))
        return self.layout


def pack_context(decoder: Any) -> PackContext:
    """Patch: the first call gives the decoder and all of its modules a context, as `packs`."""
    context: PackContext | None = vars(decoder).get("packs")
    if context is None:
        context = PackContext()
        for module in decoder.modules():
            module.packs = context
    return context


def split_sequences(decoder: Any, group: SequenceGroup) -> None:
    """Makes the model compute only this rank's share of each pack from now on."""
    context = pack_context(decoder)
    if group.ranks > 1 and context.mixers:
        raise ConfigError(
            f"policy.sequence_parallel ({group.ranks}): {type(decoder).__name__} has {', '.join(context.mixers)}, which hand "
            "state from token to token, so ranks cannot share a sequence. Use 1."
        )
    context.group = group
