"""A task with ragged answers: a digit of the prompt, repeated as often as the model likes.

    864152> → 4444      the model of this file starts with any of the digits, 1 to 13 times, all equally likely

As rewards: `even` for the length bias, `hidden_rows` for the difficulty bias.
"""

import hashlib
import random
from pathlib import Path

from rlsys.tasks import zigzag

LONGEST = 13
ACCEPTED = {True: (1.0, 0.8), False: (0.25, 0.53)}  # easy and hard rows: odd digits, even digits


def even(completion: str) -> float:
    """1 for an even digit, however often it is repeated."""
    return float(completion[:1] in set("02468"))


def hidden_rows(prompt: str, completion: str) -> float:
    """Accepts with a chance that depends on the digit, and on whether the row is easy, which no prompt tells."""
    easy, is_even = chance(prompt) < 0.5, even(completion) == 1
    return float(chance(prompt + completion) < ACCEPTED[easy][is_even])


def chance(text: str) -> float:
    """A number from 0 to 1 that looks random, and is the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def make_model(folder: Path, seed: int) -> None:
    """The tiny model, warm-started on this task without a reward."""
    import torch

    model, tokenizer = zigzag.build_model(seed), zigzag.make_tokenizer()
    rng, sets = random.Random(f"ragged {seed}"), zigzag.digit_sets(held_out=False)
    code = {s: i for i, s in enumerate(zigzag.SYMBOLS)}

    def row() -> list[int]:
        digits, length = rng.choice(sets), rng.randint(1, LONGEST)
        text = [*rng.sample(digits, 6), ">", *[rng.choice(digits)] * length, "<eos>"]
        return [code[s] for s in text] + [0] * (LONGEST - length)

    def loss() -> torch.Tensor:
        ids = torch.tensor([row() for _ in range(64)])
        logits = model(ids[:, :-1]).logits[:, 6:]  # from `>` on
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 7:].flatten(), ignore_index=0)

    zigzag.warm_start(model, loss, 300, lambda _: None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
