"""The packing proof of each role, at its start. See `workers.learner.proofs.packing`."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rlsys.config.schema import Config
from rlsys.forward.lora import adapted_layers
from rlsys.forward.unpackable import LAYER_ERRORS, refusing_unpackable
from rlsys.types import Pack
from workers.learner.files.partitioning import gathering_layers, is_partitioned
from workers.learner.proofs.against_peft import compare_with_peft
from workers.learner.proofs.packing import in_float32, prove_packing


class ForwardAll(Protocol):
    def __call__(self, packs: list[Pack], **options: bool) -> list[Any]: ...


def prove_loaded(packed: Any, config: Config) -> None:
    """Compares what has to be compared before DeepSpeed takes the model over. All ranks take part."""
    if config.policy.zero_stage == 3:
        prove_for_zero_3(packed, packed.decoder, packed.lm)
    if config.model.adapter and adapted_layers(packed.lm):
        compare_with_peft(packed.lm, Path(config.model.adapter).expanduser())


def prove_logprobs(lm: Any, forward_all: ForwardAll) -> None:
    """Compares the log-probs of a pack with those that the model itself computes. Raises if they differ."""
    prove_logprobs_once(lm, forward_all, lm.dtype)
    if converts(lm):
        with in_float32(lm.get_decoder(), lm.get_output_embeddings()):
            prove_logprobs_once(lm, forward_all, torch.float32)


def prove_states(decoder: Any, forward_all: ForwardAll) -> None:
    """Compares hidden states, because a critic begins with the value 0 for all. Raises if they differ."""
    prove_states_once(decoder, forward_all, decoder.dtype)
    if converts(decoder):
        with in_float32(decoder):
            prove_states_once(decoder, forward_all, torch.float32)


def prove_for_zero_3(packed: Any, decoder: Any, lm: Any = None) -> None:
    """Proves in float32 a model that is loaded for ZeRO 3, before DeepSpeed gathers its parameters by itself.

    Without safetensors files the model is still whole, and nothing is gathered.
    """
    if next(decoder.parameters()).dtype == torch.float32:
        return
    head = lm.get_output_embeddings() if lm else None
    with gathering_layers(decoder, head), in_float32(decoder, head):
        if lm:
            prove_logprobs_once(lm, partial(forward_each, packed), torch.float32)
        else:
            prove_states_once(decoder, partial(forward_each, packed), torch.float32)


def converts(model: Any) -> bool:
    """Returns whether the model computes in half precision, which hides small differences, and its weights are whole."""
    weight = next(model.parameters())
    return weight.dtype != torch.float32 and not is_partitioned(weight)


def forward_each(packed: Any, packs: list[Pack], **options: bool) -> list[Any]:
    return [packed(pack, **options) for pack in packs]


def prove_logprobs_once(lm: Any, forward_all: ForwardAll, dtype: torch.dtype) -> None:
    with refusing_unpackable(lm.config._name_or_path, lm.config.model_type, *LAYER_ERRORS):
        prove_packing(
            type(lm).__name__,
            lm.get_decoder(),
            packed=lambda pack: forward_all([pack])[0][0],
            alone=lambda pack: forward_all([pack], plain=True)[0][0],
            dtype=dtype,
        )


def prove_states_once(decoder: Any, forward_all: ForwardAll, dtype: torch.dtype) -> None:
    with refusing_unpackable(decoder.config._name_or_path, decoder.config.model_type, *LAYER_ERRORS):
        prove_packing(
            type(decoder).__name__,
            decoder,
            packed=lambda pack: forward_all([pack], states=True)[0],
            alone=lambda pack: forward_all([pack], states=True)[0],
            dtype=dtype,
        )
