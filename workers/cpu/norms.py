"""The engine's norms in one pass, on CPU. vLLM's CPU build has kernels for them, and by itself takes six operations of torch instead.

They are told to vLLM as one more way to do two of its operations; what they are not made for is done the usual way. Rows are
computed one by one: what a token gets does not depend on the tokens beside it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

PROVIDER = "rlsys"  # what vLLM calls it
KERNEL_CONFIG = {
    "ir_op_priority": {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
}  # its kernel_config


def register_kernels() -> None:
    """Before an engine is built with PRIORITY; may be called again."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    ways = {"rms_norm": (norm, supports_norm, False), "fused_add_rms_norm": (add_and_norm, supports_add_and_norm, True)}
    for name, (way, takes, in_place) in ways.items():
        operation: Any = getattr(ir.ops, name)
        if PROVIDER not in operation.impls:
            operation.register_impl(PROVIDER, supports_args=takes, inplace=in_place)(way)


def supports_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether the kernel is made for such a norm."""
    return weight is not None and weight.dtype == x.dtype and variance_size is None and rounds_to_nearest(x.dtype)


@functools.cache
def rounds_to_nearest(dtype: torch.dtype) -> bool:
    """Whether the kernel rounds to the nearest number. Where the CPU has no bfloat16 of its own, vLLM's cuts digits off."""
    x = torch.linspace(1, 2, 256, dtype=dtype)
    exact = x.double() / x.double().pow(2).mean().sqrt()
    return bool(norm(x, torch.ones_like(x), 0.0).sub(exact).mean().abs() < torch.finfo(dtype).eps / 4)


def supports_add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous()
    return whole and x_residual.dtype == x.dtype and supports_norm(x, weight, epsilon, variance_size)


def norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """[..., D], [D] -> [..., D]"""
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum, in place of `x` and `x_residual`.  [T, D], [T, D], [D] -> [T, D], [T, D]"""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
