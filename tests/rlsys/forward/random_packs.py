"""Random packs, and random heads for attention over them."""

import random

import torch
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8


def random_pieces(seed: int, tokens: int) -> tuple[list[int], list[int]]:
    """Sequences of their own, and prompts with up to five completions, in any order."""
    draw = random.Random(seed)
    lengths: list[int] = []
    parents: list[int] = []
    while sum(lengths) < tokens:
        parents.append(-1)
        lengths.append(draw.choice([1, 2, 7, 60, 128, 200]))
        parent = len(lengths) - 1
        for _ in range(draw.randint(0, 5)):
            parents.append(parent)
            lengths.append(draw.choice([1, 3, 20, 129]))
    return lengths, parents


def random_heads(seed: int, tokens: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [(2 * torch.randn(shape, generator=draw)).requires_grad_() for shape in shapes]
