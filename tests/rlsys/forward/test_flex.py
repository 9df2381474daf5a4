"""The mask and score functions that FlexAttention gets on GPUs, computed on CPU, against padded blocks."""

import pytest
import torch
from random_packs import HEADS, random_heads, random_pieces
from torch.nn.attention import flex_attention

from rlsys.forward.attention import packed_attention
from rlsys.forward.flex import BLOCK, attend_by_flex, build_paths, mask_function, seen_blocks
from rlsys.forward.layout import build_layout


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients_are_those_of_blocks(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """With the library's own formulas of gradients, which it has for CPU too, but does not offer there."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    for seed in range(2):
        lengths, parents = random_pieces(seed, tokens=200)
        total = sum(lengths)
        inputs = random_heads(seed, total)
        sinks = torch.randn(HEADS, requires_grad=True) if with_sinks else None
        changing = [*inputs] + ([sinks] if sinks is not None else [])
        blocks, _ = packed_attention(
            torch.nn.Module(),
            *inputs,
            None,
            0.3,
            layout=build_layout(lengths, parents),
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
        )
        flex = attend_by_flex(*inputs, build_paths(lengths, parents, "cpu"), 0.3, window, softcap, sinks)
        torch.testing.assert_close(flex, blocks, rtol=0, atol=1e-5)
        weights = torch.randn(flex.shape, generator=torch.Generator().manual_seed(seed))
        of_blocks = torch.autograd.grad((blocks * weights).sum(), changing)
        of_flex = torch.autograd.grad((flex * weights).sum(), changing)
        for one, other in zip(of_flex, of_blocks, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


@pytest.mark.parametrize("window", [None, 1, 130, 300])
def test_blocks_that_are_left_out_hold_nothing_and_whole_ones_everything(window: int | None) -> None:
    wholes = 0
    for seed in range(20):
        lengths, parents = random_pieces(seed, tokens=700)
        if seed % 2:  # long pieces, so that some blocks are seen whole
            lengths = [length + 400 if length >= 128 else length for length in lengths]
        total = sum(lengths)
        sees = mask_function(build_paths(lengths, parents, "cpu"), window)
        every = torch.arange(total)
        zero = torch.zeros((), dtype=torch.long)
        dense = sees(zero, zero, every[:, None], every[None])
        count = -(-total // BLOCK)
        padded = torch.zeros(count * BLOCK, count * BLOCK, dtype=torch.bool)
        padded[:total, :total] = dense
        by_block = padded.unflatten(0, (count, BLOCK)).unflatten(2, (count, BLOCK)).transpose(1, 2)
        some, whole = seen_blocks(lengths, parents, window)
        assert torch.equal(some | whole, by_block.any(-1).any(-1))
        assert not (whole & ~by_block.all(-1).all(-1)).any()
        assert not (some & whole).any()
        wholes += int(whole.sum())
    assert bool(wholes) == (window is None or window >= 2 * BLOCK)
