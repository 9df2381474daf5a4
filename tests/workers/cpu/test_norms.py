"""Norms by vLLM's kernels for CPUs: what its own operations give, and the same for a token whatever is beside it."""

from typing import Any

import pytest
import torch

from workers.cpu import norms

NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def operations() -> Any:
    norms.register_kernels()
    norms.register_kernels()  # of a second engine in the process
    from vllm import ir

    return ir.ops


def need_rounding(dtype: torch.dtype) -> None:
    if not norms.rounds_to_nearest(dtype):
        pytest.skip(f"this CPU has no {dtype} of its own, and vLLM's kernel cuts digits off")


def inputs(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    made = torch.randn(*shape, generator=source), 1 + torch.randn(shape[-1], generator=source) / 8
    return made[0].to(dtype), made[1].to(dtype)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_norm_is_vllms_own_to_rounding_and_a_rows_does_not_depend_on_the_others(operations: Any, dtype: Any) -> None:
    need_rounding(dtype)
    x, weight = inputs(dtype, 37, 64)
    whole = norms.norm(x, weight, 1e-6)
    native = operations.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    assert torch.allclose(whole.float(), native.float(), rtol=NEAR[dtype], atol=NEAR[dtype])
    for a, b in ((0, 1), (7, 23), (36, 37)):
        assert torch.equal(norms.norm(x[a:b], weight, 1e-6), whole[a:b])


def test_heads_that_lie_among_others_are_found(operations: Any) -> None:
    x, weight = inputs(torch.float32, 5, 6, 32)
    heads = x[:, 2:4]  # as the keys in a product of queries, keys and values
    assert torch.equal(norms.norm(heads, weight, 1e-6), norms.norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", NEAR)
def test_a_kernel_that_cuts_digits_off_is_found(operations: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(dtype, 37, 64)
    exact = operations.rms_norm.impls["native"].impl_fn(x.double(), weight.double(), 1e-6)
    error = (norms.norm(x, weight, 1e-6).double().abs() - exact.abs()).mean()
    assert norms.rounds_to_nearest(dtype) == bool(error > -torch.finfo(dtype).eps / 8)
    monkeypatch.setattr(norms, "rounds_to_nearest", lambda dtype: False)
    assert not norms.supports_norm(x, weight, 1e-6)
    assert not norms.supports_add_and_norm(x, x, weight, 1e-6)


@pytest.mark.parametrize("dtype", NEAR)
def test_a_sum_and_its_norm_are_vllms_own_to_rounding(operations: Any, dtype: Any) -> None:
    need_rounding(dtype)
    (x, weight), residual = inputs(dtype, 37, 64), inputs(dtype, 38, 64)[0][1:]
    native = operations.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    alone = norms.add_and_norm(x[3:4].clone(), residual[3:4].clone(), weight, 1e-6)
    found = norms.add_and_norm(x, residual, weight, 1e-6)
    for ours, theirs, one in zip(found, native, alone, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=NEAR[dtype], atol=NEAR[dtype])
        assert torch.equal(ours[3:4], one)


def test_an_engine_takes_them_wherever_they_are_made_for_it(operations: Any) -> None:
    x, weight = inputs(torch.float32, 4, 64)
    one, two = operations.rms_norm, operations.fused_add_rms_norm
    priority = norms.KERNEL_CONFIG["ir_op_priority"]
    with one.set_priority(priority["rms_norm"]), two.set_priority(priority["fused_add_rms_norm"]):
        ways = [
            one.dispatch(x, weight, 1e-6),
            one.dispatch(x, None, 1e-6),
            one.dispatch(x, weight.bfloat16(), 1e-6),
            one.dispatch(x, weight, 1e-6, 32),
            two.dispatch(x, x.clone(), weight, 1e-6),
            two.dispatch(x, x.t().contiguous().t(), weight, 1e-6),
        ]
    assert [way.provider == norms.PROVIDER for way in ways] == [True, False, False, False, True, False]
