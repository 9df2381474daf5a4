"""Games whose conversations begin anew: with what the harness remembers, or with what the model wrote down for itself."""

import random
from typing import Any

from torch import Tensor

from rlsys.algorithms.losses import LOSSES
from rlsys.tasks.guess import GUESSES, LOWER, NUMBERS, answer, turn_score

EVERY = 2  # turns, after which the history is replaced by a summary
NOTES = 3  # that the model writes in a game of memory
TURN = 2  # tokens: a number, and its end


async def guess_compacted(row: dict[str, Any], ask: Any, *, scored: bool = False) -> dict[str, float]:
    """Is the built-in game `guess`; after every two turns, the conversation begins anew with the range that is left."""
    low, high, secret = row["low"], row["high"], row["secret"]
    reply = await ask(f"{low} {high}")
    for turn in range(1, GUESSES + 1):
        guess = int(reply.text) if reply.text.isdecimal() else None
        if scored:
            reply.score(turn_score(guess, low, high, GUESSES - turn))
        if guess is None or guess == secret or turn == GUESSES:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        if turn % EVERY:
            reply = await ask(answer(guess, secret))
        else:
            reply = await ask(f"{low} {high}", after=None)
    return {"solved": float(guess == secret)}


async def guess_compacted_scored(row: dict[str, Any], ask: Any) -> dict[str, float]:
    return await guess_compacted(row, ask, scored=True)


async def largest(row: dict[str, Any], ask: Any) -> dict[str, float]:
    """Shows numbers one after the other, each with the model's last note alone; then asks for the largest.

    model sees   20 7      writes  20      a note
                 20 25     writes  25
                 25 3      writes  25
                 lower 25  writes  25      the answer
    """
    first, *others = row["numbers"]
    note = str(first)
    for number in others:
        note = (await ask(f"{note} {number}", after=None)).text
        if not note.isdecimal():
            return {"near": 0.0}
    text = (await ask(f"{LOWER} {note}", after=None)).text
    missed = abs(int(text) - max(row["numbers"])) if text.isdecimal() else NUMBERS
    return {"near": max(1 - missed / 8, 0.0)}


def rows(name: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(name)
    return [{"numbers": [rng.randrange(NUMBERS) for _ in range(NOTES + 1)], "source": "largest"} for _ in range(count)]


def answers_alone(logprobs: Tensor, old: Tensor, advantages: Tensor, sequences: Tensor, **options: Any) -> Tensor:
    """Is the loss `ppo_clip` on the last turn of each episode, and 0 on the notes before: they are masked."""
    losses = LOSSES["ppo_clip"](logprobs, old, advantages, sequences, **options)
    ends = sequences != sequences.roll(-1)
    ends[-1:] = True
    own = ends.clone()
    for _ in range(TURN - 1):
        own |= own.roll(-1) & (sequences == sequences.roll(-1))
    return losses * own
