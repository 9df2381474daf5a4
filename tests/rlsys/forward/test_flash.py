"""The ragged sequences that FlashAttention gets on GPUs, with its kernel written as a loop."""

import pytest
import torch
from random_packs import random_heads, random_pieces
from torch import Tensor

from rlsys.forward import flash
from rlsys.forward.attention import packed_attention
from rlsys.forward.layout import build_layout


def loop_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **_) -> Tensor:
    """Causal attention of each sequence apart; the last query sees the last key."""
    out = []
    for i in range(len(cu_seq_q) - 1):
        q, k, v = query[cu_seq_q[i] : cu_seq_q[i + 1]], *(x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (key, value))
        assert len(q) <= max_q
        assert len(k) <= max_k
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(len(k))[None] - torch.arange(len(k) - len(q), len(k))[:, None]
        left = len(k) if window_size[0] < 0 else window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill((distance > 0) | (distance < -left), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("seed", range(5))
def test_ragged_keys_give_the_attention_of_blocks(monkeypatch, seed, window):
    monkeypatch.setattr(flash, "varlen_attn", loop_kernel)
    lengths, parents = random_pieces(seed, tokens=100)
    inputs = random_heads(seed, sum(lengths))
    layout = build_layout(lengths, parents)
    blocks, _ = packed_attention(torch.nn.Module(), *inputs, None, 0.3, layout=layout, sliding_window=window)
    ragged = flash.ragged_keys(lengths, parents, "cpu")
    flat = flash.flash_attention(*(x[0] for x in inputs), ragged, 0.3, window)
    torch.testing.assert_close(flat, blocks[0], rtol=0, atol=1e-5)
    weights = torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed))
    of_blocks = torch.autograd.grad((blocks[0] * weights).sum(), inputs)
    of_flat = torch.autograd.grad((flat * weights).sum(), inputs)
    for one, other in zip(of_flat, of_blocks, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


def test_keys_are_the_prompt_and_then_the_piece():
    ragged = flash.ragged_keys([2, 1, 3], [-1, 0, 0], "cpu")
    assert ragged.tokens.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert ragged.query_ends.tolist() == [0, 2, 3, 6]
    assert ragged.key_ends.tolist() == [0, 2, 5, 10]
    assert (ragged.most_queries, ragged.most_keys) == (3, 5)


def test_gradients_of_a_shared_prompt_are_added_in_float32():
    """256 + 1 is 256 in bfloat16; 256 + 1 + 1 is 258."""
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = flash.RepeatPrefixes.apply(x, torch.zeros(3, dtype=torch.long))
    out.backward(torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).view(3, 1, 1))
    assert x.grad.item() == 258
