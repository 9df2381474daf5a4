"""Norms of an engine on CPU in one pass.

vLLM's CPU build has kernels for norms, but by itself uses six torch operations instead. Here the kernels are registered
as another implementation of two of vLLM's operations. Norms that a kernel does not support are computed as before. Rows
are computed one by one: a token's result does not depend on the other tokens of the batch.
"""

import functools
from typing import Any

import torch
from torch import Tensor

PROVIDER = "rlsys"  # the implementation's name in vLLM
KERNEL_CONFIG = {  # of vLLM's EngineArgs
    "ir_op_priority": {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
}


def register_kernels() -> None:
    """Called before an engine is built with KERNEL_CONFIG. A second call does nothing."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernels = {
        "rms_norm": (norm, supports_norm, False),
        "fused_add_rms_norm": (add_and_norm, supports_add_and_norm, True),
    }
    for name, (kernel, supports, in_place) in kernels.items():
        operation: Any = getattr(ir.ops, name)
        if PROVIDER not in operation.impls:
            operation.register_impl(PROVIDER, supports_args=supports, inplace=in_place)(kernel)


def supports_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    has_weight = weight is not None and weight.dtype == x.dtype
    return has_weight and variance_size is None and rounds_to_nearest(x.dtype)


@functools.cache
def rounds_to_nearest(dtype: torch.dtype) -> bool:
    """Returns whether the kernel rounds to the nearest number.

    On a CPU without bfloat16 instructions, vLLM's kernel truncates.
    """
    x = torch.linspace(1, 2, 256, dtype=dtype)
    exact = x.double() / x.double().pow(2).mean().sqrt()
    return bool(norm(x, torch.ones_like(x), 0.0).sub(exact).mean().abs() < torch.finfo(dtype).eps / 4)


def supports_add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    contiguous = x.is_contiguous() and x_residual.is_contiguous()
    return contiguous and x_residual.dtype == x.dtype and supports_norm(x, weight, epsilon, variance_size)


def norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """[..., D], [D] -> [..., D]"""
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the sum and its norm in place of `x_residual` and `x`.  [T, D], [T, D], [D] -> [T, D], [T, D]"""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
