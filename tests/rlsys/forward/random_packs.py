"""Random packs, and random heads for attention over them."""

import random

import torch
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8


def random_pieces(seed: int, tokens: int) -> tuple[list[int], list[int]]:
    """Sequences of their own, prompts with up to five completions, and trees of turns, in any order."""
    draw = random.Random(seed)
    lengths: list[int] = []
    parents: list[int] = []
    while sum(lengths) < tokens:
        parents.append(-1)
        lengths.append(draw.choice([1, 2, 7, 60, 128, 200]))
        path = [len(lengths) - 1]
        deep = draw.random() < 0.5
        for _ in range(draw.randint(0, 5 + 5 * deep)):
            del path[draw.randint(1, len(path)) :]
            parents.append(path[-1])
            path += [len(lengths)] * deep
            lengths.append(draw.choice([1, 3, 20, 129]))
    return lengths, parents


def random_heads(seed: int, tokens: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [(2 * torch.randn(shape, generator=draw)).requires_grad_() for shape in shapes]
