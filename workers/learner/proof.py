"""The packing proof of each role, at its start. See `rlsys.packs.proof`."""

from typing import Any, Protocol

from rlsys.packs.proof import prove_packing
from rlsys.types import Pack
from workers.learner.model import LAYER_ERRORS, refusing_unpackable


class ForwardAll(Protocol):
    def __call__(self, packs: list[Pack], **options: bool) -> list[Any]: ...


def prove_logprobs(lm: Any, forward_all: ForwardAll) -> None:
    """Compares the log-probs of a pack with those that the model itself computes. Raises if they differ."""
    with refusing_unpackable(lm.config._name_or_path, lm.config.model_type, *LAYER_ERRORS):
        prove_packing(
            type(lm).__name__,
            lm.get_decoder(),
            packed=lambda pack: forward_all([pack])[0][0],
            alone=lambda pack: forward_all([pack], plain=True)[0][0],
        )


def prove_states(decoder: Any, forward_all: ForwardAll) -> None:
    """Compares hidden states, because a critic begins with the value 0 for all. Raises if they differ."""
    with refusing_unpackable(decoder.config._name_or_path, decoder.config.model_type, *LAYER_ERRORS):
        prove_packing(
            type(decoder).__name__,
            decoder,
            packed=lambda pack: forward_all([pack], states=True)[0],
            alone=lambda pack: forward_all([pack], states=True)[0],
        )
