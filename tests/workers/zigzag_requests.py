"""Requests for the prompts of the zigzag task, and the samples that engines return for them."""

from typing import Any

import numpy as np

from rlsys.tasks import zigzag
from rlsys.types import Batch, Prompt, Request, Sample
from workers.rollout.rollout_group import RolloutGroup

PROMPTS = [row["prompt"] for row in zigzag.rows("zigzag_heldout")[:12]]


def make_requests(tokenizer: Any, *, n: int = 1, temperature: float = 0.0, repeat: int = 1) -> list[Request]:
    """`n` samples of each prompt. `repeat`: how often its tokens are repeated."""
    return [
        Request(f"p{g}", i, tokenizer.encode(text) * repeat, 1000 * g + i, temperature, 10)
        for g, text in enumerate(PROMPTS)
        for i in range(n)
    ]


def generate(group: RolloutGroup, requests: list[Request]) -> list[Sample]:
    """Returns the samples in the order of the requests."""
    by_key = {(s.uid, s.index): s for samples in group.generate(requests) for s in samples}
    return [by_key[r.uid, r.index] for r in requests]


def make_batch(tokenizer: Any, samples: list[Sample], repeat: int = 1) -> Batch:
    prompts = [Prompt(f"p{g}", "zigzag", text, tokenizer.encode(text) * repeat, {}) for g, text in enumerate(PROMPTS)]
    group = np.array([int(s.uid[1:]) for s in samples])
    return Batch(prompts, samples, group, np.zeros(len(samples), np.float32), [{}] * len(samples))


def same_bits(a: list[Sample], b: list[Sample]) -> bool:
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True)
    )
