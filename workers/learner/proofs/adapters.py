"""Proves, before the first sync, that adapters reach the engines and that the policy computes with them.

A new adapter is zero, so the first sync could not show that it is missing. While the proof runs, B is random:
    sent      what a sync sends for the layer's weight is W + s B A, computed here in another way
    computed  the layer's output in a forward pass of the whole model is its input times what is sent
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsys.errors import ConfigError
from rlsys.forward.lora import LoraLinear, adapted_layers
from workers.learner.proofs.at_start import ForwardAll
from workers.learner.proofs.packing import proof_packs
from workers.sync.layout import split_into_buckets
from workers.sync.sending import PolicyWeights

ROWS = 4  # of a layer's input
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
}  # as a share of the largest element; a real fault is about as large as that element


def prove_adapters(lm: Any, forward_all: ForwardAll, weights: PolicyWeights, scale: float) -> None:
    """Raises unless every adapter is applied as W + scale B A. All ranks take part."""
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(lm).items()}
    pack, _ = proof_packs(lm.get_input_embeddings().num_embeddings)
    with random_adapters(list(layers.values()), scale), torch.compiler.set_stance("force_eager"):
        rows = record_rows(layers, lambda: forward_all([pack]))
        if unused := sorted(layers.keys() - rows.keys()):
            raise ConfigError(
                f"policy.lora.targets: {type(lm).__name__} does not call {unused[0].removesuffix('.weight')} as a layer, so its "
                "adapter would not be applied. Name other layers."
            )
        for entries in split_into_buckets(weights.manifest()):
            with weights.whole(entries) as tensors:
                for name, sent in tensors:
                    if layer := layers.get(parameter := weights.parameter_of[name]):
                        prove_layer(parameter, layer, sent, scale, *rows[parameter])


def prove_layer(name: str, layer: LoraLinear, sent: Tensor, scale: float, inputs: Tensor, outputs: Tensor) -> None:
    """`inputs` [rows, in] and `outputs` [rows, out] are the layer's own. The layer's parameters are whole."""
    b, a = layer.lora_B.detach().float(), layer.lora_A.detach().float()
    expected = layer.weight.detach().float() + scale * torch.einsum("or,ri->oi", b, a)
    bias = None if layer.bias is None else layer.bias.detach().float()
    product = F.linear(inputs.float(), sent.float(), bias)
    gaps = {
        "is not sent to the engines": gap(sent, expected, layer.format, sent.dtype),
        "is not what the policy computes with": gap(outputs, product, outputs.dtype),
    }
    for problem, size in gaps.items():
        if not size <= 1:
            raise AssertionError(f"{name}: W + {scale:g} B A {problem}. Policy and engines would differ.")


def gap(actual: Tensor, expected: Tensor, *formats: torch.dtype) -> float:
    """Returns the largest difference, as a multiple of what rounding to these formats may cause."""
    tolerance = max(TOLERANCE[format] for format in formats)
    return float((actual.float() - expected).abs().max() / (tolerance * expected.abs().max()))


def record_rows(layers: dict[str, LoraLinear], forward: Callable[[], Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs a forward pass. Returns the first rows of input and output of every layer that was called."""
    rows: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str) -> Callable[[Any, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs = arguments[0].detach()
            rows[name] = (
                inputs.reshape(-1, inputs.shape[-1])[:ROWS].clone(),
                output.detach().flatten(0, -2)[:ROWS].clone(),
            )

        return hook

    hooks = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return rows


@contextmanager
def random_adapters(layers: list[LoraLinear], scale: float) -> Iterator[None]:
    """Each rank fills its own part of every B, and restores it at the end."""
    parts = [getattr(layer.lora_B, "ds_tensor", layer.lora_B).data for layer in layers]
    saved = [part.clone() for part in parts]
    random = torch.Generator().manual_seed(0)
    try:
        for part in parts:
            part.copy_(torch.randn(part.shape, generator=random) / scale)
        yield
    finally:
        for part, original in zip(parts, saved, strict=True):
            part.copy_(original)
