"""LoRA with merged weights (Hu et al. 2021, arXiv 2106.09685): a layer computes with W' = round(W + s B A), s = alpha / rank.

W stays as it is; A [rank, in] and B [out, rank] learn. Engines get W'. `round` is to the engines' number format, so policy
and engine compute with the same bits, and an update that rounding removes is removed for both.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.errors import ConfigError
from rlsys.forward import exact

ALL_LINEAR = "all-linear"  # every linear layer but the output layer, as in PEFT
MATRICES = ("lora_A", "lora_B")


class LoraLinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter. Without the adapter it is the layer of step 0."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    format: torch.dtype  # the engines'
    exact: bool
    adapted: bool

    def forward(self, input: Tensor) -> Tensor:
        if self.adapted:
            return lora_linear(
                input, self.weight, self.lora_A, self.lora_B, self.bias, self.scale, self.format, self.exact
            )
        weight = self.weight.to(self.format).to(self.weight.dtype)
        return exact.linear(input, weight, self.bias) if self.exact else F.linear(input, weight, self.bias)

    def merged(self) -> Tensor:
        """Returns the weight that the layer computes with.  [out, in]"""
        return merge(self.weight.detach(), self.lora_A.detach(), self.lora_B.detach(), self.scale, self.format)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, format: torch.dtype) -> Tensor:
    """Returns round(W + s B A), in W's own number format.  [out, in], [rank, in], [out, rank] -> [out, in]"""
    # Copies begin at an aligned address. A matrix library may sum in another order where a matrix begins elsewhere.
    update = b.to(torch.float32, copy=True) @ a.to(torch.float32, copy=True)
    return update.mul_(scale).add_(weight).to(format).to(weight.dtype)


# An operator of its own, so that compiled layers merge with the same bits as a sync does.
@torch.library.custom_op("rlsys::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scale: float,
    format: torch.dtype,
    exact_: bool,
) -> Tensor:
    """Returns x W'ᵀ + bias.  [..., in] -> [..., out]"""
    linear = exact.linear if exact_ else F.linear
    return linear(x, merge(weight, a, b, scale, format), bias)


@lora_linear.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, a, b, _, ctx.scale, ctx.format, _ = inputs
    ctx.save_for_backward(x, weight, a, b)  # W' is computed again: kept, it would be a second model in memory


def lora_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Computes, with G the gradient of W', dB = s G Aᵀ and dA = s Bᵀ G. G = gradientᵀ x itself is never computed."""
    x, weight, a, b = ctx.saved_tensors
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = gradient @ merge(weight, a, b, ctx.scale, ctx.format)
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    grad_a = (gradient @ b).t() @ x * ctx.scale
    grad_b = gradient.t() @ (x @ a.t()) * ctx.scale
    return grad_x, None, grad_a, grad_b, None, None, None, None


lora_linear.register_autograd(lora_gradients, setup_context=keep_for_backward)


# --- models with adapters ---------------------------------------------------------------------------------------------


def add_adapters(
    lm: Any, *, rank: int, alpha: float, targets: Sequence[str], format: torch.dtype, seed: int
) -> dict[str, LoraLinear]:
    """Freezes the model and gives an adapter to each target layer. Returns these layers by name.

    A is random and B is zero, as PEFT starts them: the model computes what it did before.
    """
    chosen = find_targets(lm, targets)
    lm.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for layer in chosen.values():
        described = layer.weight.is_meta  # its values are in files
        like = {"dtype": layer.weight.dtype, "device": "cpu" if described else layer.weight.device}
        bound = 1 / math.sqrt(layer.in_features)  # of kaiming_uniform_ with a = √5
        a = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=random)
        layer.lora_A = nn.Parameter(a.to(**like))
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        layer.exact = isinstance(layer, exact.ExactLinear)
        layer.scale, layer.format, layer.adapted = alpha / rank, format, True
        layer.__class__ = LoraLinear
    return chosen


def find_targets(lm: Any, targets: Sequence[str]) -> dict[str, Any]:
    """Returns the layers that `targets` name, each by its name or the last parts of it. Raises if a target matches nothing."""
    head = lm.get_output_embeddings()
    linear = {n: m for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    chosen = {n: m for n, m in linear.items() if ALL_LINEAR in targets or any(is_named(n, t) for t in targets)}
    unmatched = [t for t in targets if t != ALL_LINEAR and not any(is_named(n, t) for n in linear)]
    experts = sorted({n for n, p in lm.named_parameters() if p.dim() == 3 and "experts" in n.split(".")})
    names = ", ".join(dict.fromkeys(n.rpartition(".")[2] for n in linear)) or "none"
    if experts and (ALL_LINEAR in targets or any(t in n.split(".") for t in unmatched for n in experts)):
        raise ConfigError(
            f"policy.lora.targets: {type(lm).__name__} keeps its experts in tensors such as {experts[0]}, and rlsys "
            f"adapts linear layers only. Name the layers, such as [q_proj, v_proj]; it has {names}."
        )
    if unmatched or not chosen:
        raise ConfigError(
            f"policy.lora.targets: {', '.join(unmatched) or ', '.join(targets) or 'an empty list'} matches no linear layer of "
            f"{type(lm).__name__} below its output layer; it has {names}. Name some of those, or {ALL_LINEAR}."
        )
    return chosen


def is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def adapted_layers(lm: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in lm.named_modules() if isinstance(module, LoraLinear)}


def is_adapter(parameter: str) -> bool:
    """Returns True for the name of an A or a B."""
    return parameter.rpartition(".")[2] in MATRICES


def trained_parameters(lm: nn.Module) -> dict[str, nn.Parameter]:
    """Returns what updates change: the adapters, or without any all parameters."""
    parameters = dict(lm.named_parameters())
    return {name: p for name, p in parameters.items() if is_adapter(name)} or parameters


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Lets the model compute as it did at step 0, with s = 0."""
    layers = adapted_layers(lm).values()
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True
