"""Attention on a GPU against float32 arithmetic on the CPU, for each piece of a pack alone."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlsys.forward.attention import packed_attention
from rlsys.forward.layout import build_layout
from rlsys.types import path_to, prefixes

LENGTHS, PARENTS = [70, 33, 128, 1, 40, 200, 19, 64], [-1, 0, 0, 2, 3, -1, 5, 5]


def attend_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[H, T, D] each, over the whole pack: a dense mask says who sees whom."""
    piece = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen_pieces = torch.zeros(len(LENGTHS), len(LENGTHS), dtype=torch.bool)
    for i in range(len(LENGTHS)):
        seen_pieces[i, [i, *path_to(PARENTS, i)]] = True
    start = torch.tensor([0, *LENGTHS]).cumsum(0)[piece]
    before = torch.tensor(prefixes(LENGTHS, PARENTS))[piece]
    position = torch.arange(len(piece)) - start + before
    ours = seen_pieces[piece[:, None], piece[None]]
    distance = position[:, None] - position[None]
    seen = ours & (distance >= 0) & (distance < (window or len(piece)))
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(piece), 1)], -1)
    return (scores.softmax(-1)[..., : len(piece)] @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_values_and_gradients(dtype: torch.dtype, bound: float, window: int | None, size: int) -> None:
    check(dtype, bound, window, size)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(5.0, False), (None, True)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_caps_and_sinks(
    dtype: torch.dtype, bound: float, softcap: float | None, with_sinks: bool, window: int | None
) -> None:
    check(dtype, bound, window, 64, softcap, with_sinks)


@pytest.mark.parametrize("size", [64, 256])
def test_caps_and_sinks_of_packs_of_many_lengths_that_are_computed_again(size: int) -> None:
    """From the second length on, one kernel computes all. Short packs would take one of its own."""
    sinks = torch.arange(6.0, device="cuda", requires_grad=True)
    for length in (515, 300, 2049, 100):
        heads = [torch.randn(1, h, length, size, device="cuda", requires_grad=True) for h in (6, 2, 2)]
        layout = build_layout([length // 2, length - length // 2], [-1, 0], "cuda")

        def attend(*inputs: torch.Tensor, layout: Any = layout) -> torch.Tensor:
            return packed_attention(torch.nn.Module(), *inputs, None, layout=layout, softcap=5.0, s_aux=sinks)[0]

        out = checkpoint(attend, *heads, use_reentrant=False)
        weights = torch.randn_like(out)
        gradients = torch.autograd.grad((out * weights).sum(), [*heads, sinks])
        slow = [x.detach().cpu().requires_grad_() for x in (*heads, sinks)]
        *inputs, slow_sinks = slow
        wanted, _ = packed_attention(
            torch.nn.Module(),
            *inputs,
            None,
            layout=build_layout([length // 2, length - length // 2], [-1, 0]),
            softcap=5.0,
            s_aux=slow_sinks,
        )
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-3, atol=1e-3)
        for one, other in zip(gradients, torch.autograd.grad((wanted * weights.cpu()).sum(), slow), strict=True):
            assert (one.cpu() - other).norm() < 1e-3 * other.norm()


def check(
    dtype: torch.dtype,
    bound: float,
    window: int | None,
    size: int,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> None:
    random = torch.Generator().manual_seed(size)
    inputs = [torch.randn(h, sum(LENGTHS), size, generator=random).to(dtype).float() for h in (6, 2, 2)]
    weights = torch.randn(sum(LENGTHS), 6, size, generator=random).to(dtype).float()
    slow = query, key, value = [x.clone().requires_grad_() for x in inputs]
    fast = [x.to("cuda", dtype)[None].requires_grad_() for x in inputs]
    sinks = [torch.arange(6.0, device=device, requires_grad=True) for device in ("cpu", "cuda")] if with_sinks else []
    wanted = attend_alone(query, key, value, window, softcap, *sinks[:1])
    out, _ = packed_attention(
        torch.nn.Module(),
        *fast,
        None,
        layout=build_layout(LENGTHS, PARENTS, "cuda"),
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks[1] if sinks else None,
    )
    torch.testing.assert_close(out[0].float().cpu(), wanted, rtol=bound, atol=bound)
    gradients = torch.autograd.grad((out[0] * weights.to("cuda", dtype)).sum(), [*fast, *sinks[1:]])
    for one, other in zip(gradients, torch.autograd.grad((wanted * weights).sum(), [*slow, *sinks[:1]]), strict=True):
        gap = (one.float().cpu().view_as(other) - other).norm() / other.norm()
        assert gap < bound
