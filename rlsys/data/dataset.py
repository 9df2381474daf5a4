"""Tokenized prompts, in an order that depends on nothing but the seed."""

from collections.abc import Sequence
from dataclasses import replace

from rlsys.data.order import Order, ShuffledOrder
from rlsys.data.store import JoinedPrompts, PromptRows
from rlsys.types import Prompt


class Dataset:
    """Tokenized prompts. `take(position, count)` reads the training stream: a new order each epoch, without an end.

    `prompts` is a list, or rows that are read on demand.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True, order: Order | None = None):
        self.prompts = prompts
        self.order = order or ShuffledOrder(len(prompts), seed=seed, shuffle=shuffle)

    @property
    def longest_prompt(self) -> int:
        """The length of the longest prompt, in tokens."""
        if isinstance(self.prompts, PromptRows | JoinedPrompts):
            return self.prompts.longest_prompt
        return max(len(p.tokens) for p in self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, i: int) -> Prompt:
        return self.prompts[i]

    def take(self, position: int, count: int) -> list[Prompt]:
        """Returns `count` prompts from `position` on. The uid of each also names the epoch."""
        taken = []
        for p in range(position, position + count):
            i, epoch = self.order(p)
            row = self.prompts[i]
            taken.append(replace(row, uid=f"{row.uid}#{epoch}"))
        return taken
