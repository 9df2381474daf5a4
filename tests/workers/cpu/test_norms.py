"""Norms by vLLM's CPU kernels: equal to its torch operations, and for a token the same beside any others."""

from typing import Any

import pytest
import torch

from workers.cpu import norms

NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def operations() -> Any:
    norms.register_kernels()
    norms.register_kernels()  # for a second engine in the process
    from vllm import ir

    return ir.ops


def need_rounding(dtype: torch.dtype) -> None:
    if not norms.rounds_to_nearest(dtype):
        pytest.skip(f"this CPU has no {dtype} instructions, and vLLM's kernel truncates")


def inputs(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, generator=rng), 1 + torch.randn(shape[-1], generator=rng) / 8
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_norm_equals_vllms_up_to_rounding_and_rows_are_independent(operations: Any, dtype: Any) -> None:
    need_rounding(dtype)
    x, weight = inputs(dtype, 37, 64)
    whole = norms.norm(x, weight, 1e-6)
    native = operations.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    assert torch.allclose(whole.float(), native.float(), rtol=NEAR[dtype], atol=NEAR[dtype])
    for a, b in ((0, 1), (7, 23), (36, 37)):
        assert torch.equal(norms.norm(x[a:b], weight, 1e-6), whole[a:b])


def test_heads_that_are_not_contiguous_are_supported(operations: Any) -> None:
    x, weight = inputs(torch.float32, 5, 6, 32)
    heads = x[:, 2:4]  # as the keys in a product of queries, keys and values
    assert torch.equal(norms.norm(heads, weight, 1e-6), norms.norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", NEAR)
def test_a_kernel_that_truncates_is_noticed(operations: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(dtype, 37, 64)
    exact = operations.rms_norm.impls["native"].impl_fn(x.double(), weight.double(), 1e-6)
    error = (norms.norm(x, weight, 1e-6).double().abs() - exact.abs()).mean()
    assert norms.rounds_to_nearest(dtype) == bool(error > -torch.finfo(dtype).eps / 8)
    monkeypatch.setattr(norms, "rounds_to_nearest", lambda dtype: False)
    assert not norms.supports_norm(x, weight, 1e-6)
    assert not norms.supports_add_and_norm(x, x, weight, 1e-6)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_sum_and_its_norm_equal_vllms_up_to_rounding(operations: Any, dtype: Any) -> None:
    need_rounding(dtype)
    (x, weight), residual = inputs(dtype, 37, 64), inputs(dtype, 38, 64)[0][1:]
    native = operations.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    singles = norms.add_and_norm(x[3:4].clone(), residual[3:4].clone(), weight, 1e-6)
    results = norms.add_and_norm(x, residual, weight, 1e-6)
    for ours, vllms, single in zip(results, native, singles, strict=True):
        assert torch.allclose(ours.float(), vllms.float(), rtol=NEAR[dtype], atol=NEAR[dtype])
        assert torch.equal(ours[3:4], single)


def test_vllm_uses_the_kernels_for_every_input_they_support(operations: Any) -> None:
    x, weight = inputs(torch.float32, 4, 64)
    norm, add_and_norm = operations.rms_norm, operations.fused_add_rms_norm
    priority = norms.KERNEL_CONFIG["ir_op_priority"]
    with norm.set_priority(priority["rms_norm"]), add_and_norm.set_priority(priority["fused_add_rms_norm"]):
        chosen = [
            norm.dispatch(x, weight, 1e-6),
            norm.dispatch(x, None, 1e-6),
            norm.dispatch(x, weight.bfloat16(), 1e-6),
            norm.dispatch(x, weight, 1e-6, 32),
            add_and_norm.dispatch(x, x.clone(), weight, 1e-6),
            add_and_norm.dispatch(x, x.t().contiguous().t(), weight, 1e-6),
        ]
    assert [kernel.provider == norms.PROVIDER for kernel in chosen] == [True, False, False, False, True, False]
