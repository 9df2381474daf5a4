"""A task with two right ways to answer, and a tiny model that knows both: a control token chooses between them.

The prompt is six digits and `>`, the answer the last digit of their sum. `<short>` gives it at once, `<think>` after the
sums on the way: `040700>` → `<short>1` or `<think>04411</think>1`. With one or two digits that are not 0, both are easily
right; five or six the model can hardly add up without thinking.
"""

import hashlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.tasks import zigzag

DIGITS = 6
SHORT, THINK, END_THINK = "<short>", "<think>", "</think>"
SYMBOLS = [*zigzag.SYMBOLS, SHORT, THINK, END_THINK]
NOT_ZERO = (1, 2, 2, 5, 6, 6)  # how many digits of a prompt are not 0, each with equal chance
HELD_OUT_SHARE = 8  # one of this many prompts is never seen in warm start or training
HELD_OUT_PROMPTS = 256
TRAIN_PROMPTS = 4096


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:two_modes` and `builtin:two_modes_heldout`."""
    held_out = name == "two_modes_heldout"
    count = HELD_OUT_PROMPTS if held_out else TRAIN_PROMPTS
    digits = itertools.islice(draw_digits(random.Random(name), held_out), count)
    return [{"prompt": d + ">", "answer": running_sums(d)[-1], "source": "two_modes"} for d in digits]


def draw_digits(rng: random.Random, held_out: bool) -> Iterator[str]:
    """Yields the digits of prompts, which may repeat."""
    while True:
        places = rng.sample(range(DIGITS), rng.choice(NOT_ZERO))
        digits = "".join(rng.choice("123456789") if place in places else "0" for place in range(DIGITS))
        if is_held_out(digits) == held_out:
            yield digits


def is_held_out(digits: str) -> bool:
    """The split is the same for every seed of the run."""
    return hashlib.sha256(digits.encode()).digest()[0] % HELD_OUT_SHARE == 0


def running_sums(digits: str) -> str:
    """The last digits of the sums on the way.  "040700" -> "044111" """
    return "".join(str(total % 10) for total in itertools.accumulate(map(int, digits)))


def answer(digits: str, mode: str) -> list[str]:
    """The symbols of a right answer.  ("040700", "<think>") -> ["<think>", *"04411", "</think>", "1"]"""
    sums = running_sums(digits)
    return [SHORT, sums[-1]] if mode == SHORT else [THINK, *sums[:-1], END_THINK, sums[-1]]


def model_folder(seed: int, note: Callable[[str], None] = lambda _: None) -> Path:
    """The warm-started model for a seed as a Hugging Face directory, made on first use and kept in the user's cache."""
    source = "".join(inspect.getsource(module) for module in (zigzag, sys.modules[__name__]))
    recipe = hashlib.sha256(source.encode()).hexdigest()[:10]
    return zigzag.cached_model(f"two-modes-{recipe}-seed{seed}", lambda folder: make_model(folder, seed, note=note))


def make_model(folder: Path, seed: int, *, steps: int = 300, note: Callable[[str], None] = lambda _: None) -> None:
    """Builds tokenizer and model, warm-starts the model on as many short as long answers, and saves both."""
    import torch

    model, tokenizer = zigzag.build_model(seed, SYMBOLS), make_tokenizer()
    rng = random.Random(f"warm start {seed}")
    digits, code = draw_digits(rng, held_out=False), {s: i for i, s in enumerate(SYMBOLS)}
    width = 2 * DIGITS + 4  # of a prompt with `>`, a long answer and the end

    def loss() -> Any:
        ids = []
        for prompt in itertools.islice(digits, 64):
            row = [*prompt, ">", *answer(prompt, rng.choice((SHORT, THINK))), "<eos>"]
            ids.append([code[s] for s in row] + [0] * (width - len(row)))
        batch = torch.tensor(ids)
        logits = model(batch[:, :-1]).logits[:, DIGITS:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, DIGITS + 1 :].flatten(), ignore_index=0)

    zigzag.warm_start(model, loss, steps, note)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> Any:
    """One token per symbol."""
    return zigzag.make_tokenizer(SYMBOLS)
