"""Which row stands at which position of the training stream. It follows from the seed: a position is all the state."""

import random
from array import array
from collections.abc import Sequence
from typing import Protocol

BLOCK = 1000  # positions within which weighted sets have their exact shares


class Order(Protocol):
    def __call__(self, position: int) -> tuple[int, int]:
        """Returns `(row, epoch)`: the row used at a position, and how often its set was completed before."""
        ...


class ShuffledOrder:
    """Every row once per epoch, in another order each time."""

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
    """Sets by weight: every block of positions has each set's share of rows, in an order of its own.

    WeightedOrder({"a": 90, "b": 5}, [3, 1], seed=0) has 750 of a and 250 of b in every 1000 positions. Each set has its
    own epochs. Rows are numbered through all sets: the first of b is 90.
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
        chosen, use = self.block[i]
        row, epoch = self.sets[chosen](number * self.counts[chosen] + use)
        return self.starts[chosen] + row, epoch

    def build_block(self, number: int) -> list[tuple[int, int]]:
        """Returns `(set, which of its uses in the block)` for each position of a block."""
        # Each set is spread evenly. Without shuffling, this is the order.
        spread = sorted(
            ((use + 0.5) / count, chosen) for chosen, count in enumerate(self.counts) for use in range(count)
        )
        order = [chosen for _, chosen in spread]
        if self.shuffle:
            random.Random(f"{self.seed} block {number}").shuffle(order)
        used = [0] * len(self.counts)
        block = []
        for chosen in order:
            block.append((chosen, used[chosen]))
            used[chosen] += 1
        return block


def split_proportionally(weights: Sequence[float], total: int = BLOCK) -> list[int]:
    """Returns whole numbers in these proportions, each at least 1, that add up to `total`.  [3, 1] -> [750, 250]

    The numbers with the largest remainders are rounded up.
    """
    exact = [w / sum(weights) * total for w in weights]
    counts = [max(int(e), 1) for e in exact]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        adjustable = [i for i in range(len(counts)) if counts[i] + step >= 1]
        best = max(adjustable, key=lambda i: (step * (exact[i] - counts[i]), -i))
        counts[best] += step
    return counts
