"""Batches of episodes that share some of their first turns."""

import random
from collections.abc import Mapping

import numpy as np

from rlsys.types import Batch, Observation, Prompt, Sample

Turns = list[tuple[list[int], list[int]]]


def forked_batch(
    seed: int, *, prompts: int = 2, samples: int = 6, turns: int = 5, words: int = 12, rewrites: float = 0.0
) -> Batch:
    """Each sample copies some turns of an earlier one, then it goes its own way.

    A share of the turns, `rewrites`, continues an earlier turn than the one before it.
    """
    draw = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(1, words + 1) for _ in range(draw.randint(least, most))]

    groups, played = [], list[Sample]()
    for group in range(prompts):
        tree: list[Turns] = []
        for index in range(samples):
            story = list(draw.choice(tree)[: draw.randint(0, turns)]) if tree else []
            count = draw.randint(1, turns)
            story += [(some(0 if not story else 1, 3), some(0, 4)) for _ in range(count - len(story))]
            tree.append(story)
            again = [i for i in range(1, len(story)) if draw.random() < rewrites]
            played.append(episode(group, index, story, {i: draw.randint(-1, i - 2) for i in again if story[i][0]}))
            groups.append(group)
    rows = [Prompt(f"p{g}", "", "", some(1, 5), {}) for g in range(prompts)]
    return Batch(rows, played, np.array(groups), np.zeros(len(played), dtype=np.float32), [{}] * len(played))


def episode(group: int, index: int, story: Turns, after: Mapping[int, int]) -> Sample:
    """`after` gives turns that do not continue the one before them."""
    own, observations = list[int](), []
    for i, (observed, turn) in enumerate(story):
        if observed:
            observations.append(Observation(len(own), np.array(observed, dtype=np.int32), after.get(i)))
        own += turn
    tokens = np.array(own, dtype=np.int32)
    return Sample(f"p{group}", index, "", tokens, -tokens.astype(np.float32), "stop", 1, (), tuple(observations))


def turn_by_turn(batch: Batch) -> Batch:
    """Each turn as a single answer to a prompt of all that the model saw before it."""
    prompts, samples = [], []
    for sample, group in zip(batch.samples, batch.groups.tolist(), strict=True):
        ends = [list(batch.prompts[group].tokens)]
        for (observed, own), earlier in zip(sample.turns, sample.continued_turns, strict=True):
            prompts.append(Prompt(f"p{len(prompts)}", "", "", ends[earlier + 1] + observed.tolist(), {}))
            samples.append(Sample(prompts[-1].uid, 0, "", own, -own.astype(np.float32), "stop", 1))
            ends.append(prompts[-1].tokens + own.tolist())
    count = len(samples)
    return Batch(prompts, samples, np.arange(count), np.zeros(count, dtype=np.float32), [{}] * count)
