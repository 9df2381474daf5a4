"""Which row is used at which position of the training stream: a pure function of the seed, so a number is the whole cursor."""

import random
from array import array
from collections.abc import Sequence
from typing import Protocol

BLOCK = 1000  # positions in which weighted sets have their exact shares


class Order(Protocol):
    def __call__(self, position: int) -> tuple[int, int]:
        """`(row, epoch)`: the row used at a position, and how often its set was gone through before."""
        ...


class ShuffledOrder:
    """Every row once an epoch, each epoch in its own order."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool = True, name: str = ""):
        self.rows, self.shuffle = rows, shuffle
        self.seed = f"{seed} {name}" if name else f"{seed}"
        self.epoch, self.order = -1, array("q")

    def __call__(self, position: int) -> tuple[int, int]:
        epoch, i = divmod(position, self.rows)
        if not self.shuffle:
            return i, epoch
        if epoch != self.epoch:
            self.order = array("q", range(self.rows))
            random.Random(f"{self.seed} epoch {epoch}").shuffle(self.order)
            self.epoch = epoch
        return self.order[i], epoch


class WeightedOrder:
    """Sets by their shares: every block of positions has each set's number of rows, in an order of its own.

    Weighted({"a": 90, "b": 5}, [3, 1], seed=0) has 750 of a and 250 of b in every 1000 positions. Each set goes through its own
    epochs. Rows are numbered through the sets in their order: b's first is 90.
    """

    def __init__(self, sets: dict[str, int], weights: Sequence[float], *, seed: int, shuffle: bool = True):
        self.seed, self.shuffle = seed, shuffle
        self.sets = [ShuffledOrder(rows, seed=seed, shuffle=shuffle, name=name) for name, rows in sets.items()]
        self.starts = [sum(list(sets.values())[:i]) for i in range(len(sets))]
        self.counts = split_proportionally(weights)
        self.number, self.block = -1, list[tuple[int, int]]()

    def __call__(self, position: int) -> tuple[int, int]:
        number, i = divmod(position, BLOCK)
        if number != self.number:
            self.number, self.block = number, self.build_block(number)
        one, nth = self.block[i]
        row, epoch = self.sets[one](number * self.counts[one] + nth)
        return self.starts[one] + row, epoch

    def build_block(self, number: int) -> list[tuple[int, int]]:
        """`(set, which of its uses in the block)` of each position."""
        # Evenly spread, which is also the order where nothing is shuffled.
        spread = sorted((((nth + 0.5) / count), one) for one, count in enumerate(self.counts) for nth in range(count))
        order = [one for _, one in spread]
        if self.shuffle:
            random.Random(f"{self.seed} block {number}").shuffle(order)
        used = [0] * len(self.counts)
        block = []
        for one in order:
            block.append((one, used[one]))
            used[one] += 1
        return block


def split_proportionally(weights: Sequence[float], of: int = BLOCK) -> list[int]:
    """Whole numbers in these proportions, at least 1 each, `of` in all: the largest remainders are rounded up.  [3, 1] -> [750, 250]"""
    exact = [w / sum(weights) * of for w in weights]
    counts = [max(int(e), 1) for e in exact]
    while sum(counts) != of:
        step = 1 if sum(counts) < of else -1
        open_to = [i for i in range(len(counts)) if counts[i] + step >= 1]
        best = max(open_to, key=lambda i: (step * (exact[i] - counts[i]), -i))
        counts[best] += step
    return counts
