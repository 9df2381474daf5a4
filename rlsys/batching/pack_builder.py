"""Lays the samples of a pack end to end, as pieces that continue each other: see `Pack`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlsys.batching.turn_tree import TurnTree
from rlsys.types import Ints


class PlacedTurn(NamedTuple):
    """Where the outputs lie that predict the tokens of a turn."""

    targets: int
    first_logit: int
    next_logits: int


class PackBuilder:
    def __init__(self, tree: TurnTree) -> None:
        self.tree = tree
        self.tokens: list[Ints] = []
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.turns: list[PlacedTurn] = []  # sample after sample
        self.end = 0

    def add_prompt_group(self, root: int, prompt: list[int], members: Sequence[int]) -> None:
        """Adds the prompt of samples and their nodes: one that alone continues another is in the same piece."""
        nodes, children = self.tree.nodes, defaultdict[int, list[int]](list)
        for node in dict.fromkeys(node for member in members for node in self.tree.paths[member]):
            children[nodes[node].parent].append(node)
        starts, ends = dict[int, int](), dict[int, int]()
        waiting = [(root, [np.array(prompt, dtype=np.int32)], -1, False)]  # node, parts, piece that it continues, alone
        while waiting:
            node, parts, piece, alone = waiting.pop()
            starts[node] = self.end
            if any(map(len, parts)):
                piece = self.extend_piece(parts) if alone and piece >= 0 else self.append_piece(parts, piece)
            ends[node] = self.end
            if after := children.get(node):
                waiting += [(child, nodes[child].parts, piece, len(after) == 1) for child in reversed(after)]
        for member in members:
            for targets, node, offset in self.tree.places(member):
                start = starts.get(node, 0) + offset
                before = start if offset or not targets else ends[nodes[node].parent]
                self.turns.append(PlacedTurn(targets, before - 1, start))

    def append_piece(self, parts: list[Ints], parent: int) -> int:
        self.lengths.append(0)
        self.parents.append(parent)
        return self.extend_piece(parts)

    def extend_piece(self, parts: list[Ints]) -> int:
        """Adds tokens to the last piece, and returns its number."""
        self.tokens += parts
        count = sum(map(len, parts))
        self.lengths[-1] += count
        self.end += count
        return len(self.lengths) - 1
