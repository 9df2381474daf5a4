"""The critic of PPO: a model that returns values, and its loss."""

from typing import Any

import torch
from torch import Tensor, nn

from rlsys.forward.decoder import run_decoder
from rlsys.types import Pack


class PackedValues(nn.Module):
    """A language model's decoder with one linear unit on top: the reward expected before each completion token."""

    def __init__(self, lm: Any):
        super().__init__()
        self.decoder = lm.get_decoder()
        weight = next(self.decoder.parameters())
        self.head = nn.Linear(lm.config.hidden_size, 1, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.head.weight)  # an untrained critic expects no reward
        nn.init.zeros_(self.head.bias)

    def forward(self, pack: Pack, states: bool = False) -> Tensor:
        """Returns values [K] before each of a pack's targets, in single precision. `states`: the head's input [K, D] instead."""
        own = run_decoder(self.decoder, pack, self.head.weight.device)
        return own.gather(own.hidden.float() if states else self.head(own.hidden)[:, 0].float())


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float = 0.2) -> Tensor:
    """Returns ½ max((v - R)², (clip(v, old - clip, old + clip) - R)²).  [T], [T], [T] -> [T]

    `old` is the estimate that `returns` were computed from. A value that has moved by `clip` towards its return learns
    nothing more from this batch. A clip of 0 means no clip.
    """
    if not (values.shape == old.shape == returns.shape):
        raise ValueError(
            f"value_loss: values {list(values.shape)}, old {list(old.shape)} and returns {list(returns.shape)} "
            "must all be [T]."
        )
    if not clip >= 0:
        raise ValueError(f"value_loss: clip is {clip}; it must be 0 or more.")
    values, old, returns = values.float(), old.detach().float(), returns.detach().float()
    clipped = old + (values - old).clamp(-clip, clip) if clip else values
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2
