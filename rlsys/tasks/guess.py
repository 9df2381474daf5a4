"""A game for episodes, and a tiny model that knows its form: guess a number from `higher` and `lower`, in six guesses.

    game    12 33            the range
    model   20
    game    higher
    model   31
    game    lower            and so on

Halving the range always wins. The warm start shows transcripts of players who guess any number of the range and ignore
the answers, so the model learns what is written when, and nothing about how to win. Its embeddings begin as waves, so
that numbers near each other look alike.
"""

import hashlib
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsys.tasks import zigzag

NUMBERS = 32
SIZES = range(15, 19)  # of ranges, in numbers
GUESSES = 6
HELD_OUT_SHARE = 8  # one of this many ranges is never seen in warm start or training
HELD_OUT_ROWS = 256
TRAIN_ROWS = 4096
HIGHER, LOWER = "higher", "lower"
SYMBOLS = ["<pad>", "<eos>", HIGHER, LOWER, *map(str, range(NUMBERS))]
WAVES = 8  # the slowest makes half a turn over all numbers


async def play(row: dict[str, Any], ask: Any, *, scored: bool = False) -> dict[str, float]:
    """Returns 1 for a game that is solved. `scored`: each turn has a score, too."""
    low, high, secret = row["low"], row["high"], row["secret"]
    reply = await ask(f"{low} {high}")
    for turns_left in reversed(range(GUESSES)):
        guess = int(reply.text) if reply.text.isdecimal() else None
        if scored:
            reply.score(turn_score(guess, low, high, turns_left))
        if guess is None or guess == secret or not turns_left:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        reply = await ask(answer(guess, secret))
    return {"solved": float(guess == secret)}


async def play_scored(row: dict[str, Any], ask: Any) -> dict[str, float]:
    return await play(row, ask, scored=True)


def turn_score(guess: int | None, low: int, high: int, turns_left: int) -> float:
    """0 for the middle of the numbers that are still possible, down to -1 for a guess that tells nothing.

    What a guess leaves of n numbers is, on average, greater by this share of n / 2 than what the middle leaves. Without
    a guess the game is over, so the turns that are left count as well.
    """
    if guess is None:
        return -1.0 - turns_left
    return -((((guess - low) - (high - guess)) / (high - low + 1)) ** 2) if low <= guess <= high else -1.0


def answer(guess: int, secret: int) -> str:
    return HIGHER if guess < secret else LOWER


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `builtin:guess` and `builtin:guess_heldout`."""
    held_out = name == "guess_heldout"
    rng, ranges = random.Random(name), number_ranges(held_out)
    chosen = [rng.choice(ranges) for _ in range(HELD_OUT_ROWS if held_out else TRAIN_ROWS)]
    return [{"low": low, "high": high, "secret": rng.randint(low, high), "source": "guess"} for low, high in chosen]


def number_ranges(held_out: bool, sizes: range = SIZES) -> list[tuple[int, int]]:
    """The split is the same for every seed of the run."""
    every = [(low, low + size - 1) for size in sizes for low in range(NUMBERS - size + 1)]
    return [r for r in every if is_held_out(r) == held_out]


def is_held_out(low_and_high: tuple[int, int]) -> bool:
    return hashlib.sha256(repr(low_and_high).encode()).digest()[0] % HELD_OUT_SHARE == 0


def model_folder(seed: int, note: Callable[[str], None] = lambda _: None) -> Path:
    """The warm-started model for a seed as a Hugging Face directory, made on first use and kept in the user's cache."""
    source = "".join(inspect.getsource(module) for module in (zigzag, sys.modules[__name__]))
    recipe = hashlib.sha256(source.encode()).hexdigest()[:10]
    return zigzag.cached_model(f"guess-{recipe}-seed{seed}", lambda folder: make_model(folder, seed, note=note))


def make_model(folder: Path, seed: int, *, steps: int = 400, note: Callable[[str], None] = lambda _: None) -> None:
    """Builds tokenizer and model, warm-starts the model on transcripts of random players, and saves both."""
    import torch

    model, tokenizer = build_model(seed), make_tokenizer()
    transcripts = random_transcripts(random.Random(f"warm start {seed}"))

    def loss() -> Any:
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(next(transcripts)) for _ in range(64)])
        logits = model(ids[:, :-1]).logits[:, 1:]  # from the first guess on
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())

    zigzag.warm_start(model, loss, steps, note)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(seed: int) -> Any:
    """The model of the zigzag task, with other symbols. The embedding of a number is a random mixture of waves."""
    import torch

    model = zigzag.build_model(seed, SYMBOLS)
    embeddings = model.get_input_embeddings().weight[-NUMBERS:]
    frequencies = math.pi / NUMBERS * torch.arange(1, WAVES + 1)
    phases = torch.arange(NUMBERS)[:, None] * frequencies  # [numbers, waves]
    waves = torch.cat([phases.cos(), phases.sin()], 1) / (1 + 0.3 * torch.arange(WAVES)).repeat(2)
    mixed = waves @ torch.randn(2 * WAVES, embeddings.shape[1])
    with torch.no_grad():
        embeddings.mul_(0.4).add_(0.1 * mixed / mixed.std())
    return model


def random_transcripts(rng: random.Random) -> Iterator[list[str]]:
    """Yields games of players who do not listen, as tokens."""
    ranges = number_ranges(held_out=False)
    while True:
        low, high = rng.choice(ranges)
        secret = rng.randint(low, high)
        tokens = [str(low), str(high)]
        for _ in range(GUESSES):
            guess = rng.randint(low, high)
            tokens += [str(guess), "<eos>", answer(guess, secret)]
        yield tokens[:-1]


def make_tokenizer() -> Any:
    """One token per word. Words are added tokens: other ones would be split as the model's family splits text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(s, lstrip=True) for s in SYMBOLS[2:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=zigzag.WINDOW
    )
