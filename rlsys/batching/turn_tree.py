"""The turns of all samples as trees, one for each prompt: those that begin alike share what they begin with.

    ab ── x ── cd. ── y ── e.     three episodes open with "x" and begin with the turn "cd."; to the same answer "y", two of
                      │ └─ f.     them say different things, and the third was answered "z"
                      └ z ─ g.

A node is what an environment said, or a turn of the model; or several of them, where one sample alone has them. A turn that
ends a sample is its own, without its last token: nothing follows from that. So single answers share their prompt alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from rlsys.types import Ints, Sample


class Stem(NamedTuple):
    """A node that several samples may share."""

    node: int
    tokens: int
    before: int  # tokens that it continues, the prompt's included


Stems = tuple[Stem, ...]


class PathTurn(NamedTuple):
    """Where a turn is in the tree."""

    targets: int  # its tokens
    node: int
    offset: int  # of its first token in the node


@dataclass(slots=True)
class Node:
    parent: int  # below 0: a prompt
    parts: list[Ints]
    before: int  # tokens that it continues
    owner: int  # the sample that brought it
    samples: int = 1  # that have it

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parts))


class TurnTree:
    """The trees of a batch. Nodes have numbers; below 0 are the prompts."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.paths: dict[int, list[int]] = {}  # the nodes of a sample, each after that which it continues
        self.turns: dict[int, list[tuple[Ints, Ints]]] = {}  # of each sample
        self.branched: dict[int, list[PathTurn]] = {}  # of samples that begin again
        self._children: dict[tuple[int, bytes], int] = {}

    def add(self, member: int, sample: Sample, group: int, prompt: int) -> None:
        """Adds a sample, whose group has a prompt of so many tokens."""
        self.paths[member], self.turns[member] = [], sample.turns
        if any(observation.after is not None for observation in sample.observations):
            self._add_branches(member, sample.continued_turns, -1 - group, prompt)
        else:
            self._add_path(member, -1 - group, prompt)

    def stems(self, member: int) -> Stems:
        """Returns the nodes that a sample shares with others, from the first on; all of them if it begins again."""
        path = self.paths[member]
        if member not in self.branched:
            path = list(takewhile(lambda node: self.nodes[node].samples > 1, path))
        return tuple(Stem(node, self.nodes[node].tokens, self.nodes[node].before) for node in path)

    def places(self, member: int) -> list[PathTurn]:
        """Returns where the turns of a sample are, when all samples have been added."""
        if member in self.branched:
            return self.branched[member]
        turns, parts = [], self._parts(member)
        for observed, own in self.turns[member]:
            if len(observed):
                next(parts)
            turns.append(PathTurn(len(own), *next(parts)) if len(own) else NO_TURN)
        return turns

    def _parts(self, member: int) -> Iterator[tuple[int, int]]:
        """Yields the node of each part of a sample, and where it begins there."""
        for number in self.paths[member]:
            offset = 0
            for part in self.nodes[number].parts:
                yield number, offset
                offset += len(part)

    def _add_path(self, member: int, node: int, prompt: int) -> None:
        """Adds a sample without branches: what no other sample shares becomes one node."""
        parts, path = [part for turn in self.turns[member] for part in turn if len(part)], self.paths[member]
        if not parts:
            return
        parts[-1] = parts[-1][:-1]
        for i, part in enumerate(parts[:-1]):
            key = node, part.tobytes()
            if (child := self._children.get(key)) is None:
                self._children[key] = self._append(member, node, parts[i:], prompt)
                return
            self._share(child)
            path.append(child)
            node = child
        self._append(member, node, parts[-1:], prompt)

    def _add_branches(self, member: int, continued: list[int], root: int, prompt: int) -> None:
        ends, inner, turns = list[int](), set(continued), self.branched.setdefault(member, [])
        for i, ((observed, own), earlier) in enumerate(zip(self.turns[member], continued, strict=True)):
            node = ends[earlier] if earlier >= 0 else root
            if len(own) or i in inner:
                node = self._step(member, node, observed, prompt)
                if i in inner:
                    node = self._step(member, node, own, prompt)
                else:
                    node = self._append(member, node, [own[:-1]], prompt)
            turns.append(PathTurn(len(own), node, 0))
            ends.append(node)

    def _step(self, member: int, parent: int, part: Ints, prompt: int) -> int:
        """Returns the node of a part that continues another node; that itself if the part has no tokens."""
        if not len(part):
            return parent
        key = parent, part.tobytes()
        if (child := self._children.get(key)) is None:
            child = self._children[key] = self._append(member, parent, [part], prompt)
        elif child not in self.paths[member]:
            self._share(child)
            self.paths[member].append(child)
        return child

    def _append(self, member: int, parent: int, parts: list[Ints], prompt: int) -> int:
        before = prompt if parent < 0 else self.nodes[parent].before + self.nodes[parent].tokens
        self.nodes.append(Node(parent, parts, before, member))
        self.paths[member].append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def _share(self, number: int) -> None:
        """Notes that one more sample has the first part of a node. What follows becomes a node of its owner."""
        node = self.nodes[number]
        node.samples += 1
        if rest := node.parts[1:]:
            node.parts = node.parts[:1]
            child = self._append(node.owner, number, rest, 0)
            if len(rest) > 1:
                self._children[number, rest[0].tobytes()] = child


NO_TURN = PathTurn(0, -1, 0)
