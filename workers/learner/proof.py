"""The packing proof of each role, at its start. See `rlsys.packs.proof`."""

from typing import Any, Protocol

from rlsys.packs.proof import prove_packing
from rlsys.types import Pack


class ForwardAll(Protocol):
    def __call__(self, packs: list[Pack], **options: bool) -> list[Any]: ...


def prove_logprobs(lm: Any, forward_all: ForwardAll) -> None:
    """Compares the log-probs of a pack with those that the model itself computes. Raises if they differ."""
    prove_packing(
        type(lm).__name__,
        lm.get_decoder(),
        packed=lambda pack: forward_all([pack])[0][0],
        alone=lambda pack: forward_all([pack], plain=True)[0][0],
    )


def prove_states(decoder: Any, forward_all: ForwardAll) -> None:
    """Compares hidden states, because a critic begins with the value 0 for all. Raises if they differ."""
    prove_packing(
        type(decoder).__name__,
        decoder,
        packed=lambda pack: forward_all([pack], states=True)[0],
        alone=lambda pack: forward_all([pack], states=True)[0],
    )
