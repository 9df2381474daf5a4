"""What the driver, an episode worker and its process say to each other about an episode, by its number."""

from dataclasses import dataclass, field
from typing import Any

from rlsys.episodes.asking import Turn
from rlsys.types import Episode


@dataclass
class Start:
    """Play an episode. If it was played before, it gets the same turns again, until it asks for something else."""

    number: int
    play: str  # the function
    row: dict[str, Any]
    max_new_tokens: int  # of a turn
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """A turn that the episode has asked for. If it asks for something else by now, the answer is void."""

    number: int
    index: int  # of the turn
    turn: Turn


@dataclass(frozen=True)
class Drop:
    """End the episode, and say nothing about it."""

    number: int


Command = Start | Answer | Drop


@dataclass(frozen=True)
class Asked:
    """The episode asks for a turn. Those from `turn` on, if there are any, are void."""

    number: int
    turn: int
    observation: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Ended:
    number: int
    finish: str
    episode: Episode


Event = Asked | Ended


def batching_s(episodes: int) -> float:
    """Seconds for which a message waits for others, as each has its cost: the more episodes, the more come in a second."""
    return min(max(episodes / 10_000, 0.01), 0.1)
