"""Messages about an episode, by its number, between the driver, an episode worker and its process.

An episode that is played again may ask for something else than before. Then its turns have another `history`, and an
answer to what it asked before is ignored, even if it comes to ask for the same later.
"""

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
    history: int = 0  # how often it has asked for something else


@dataclass(frozen=True)
class Answer:
    """A turn that the episode has asked for. It is ignored if the episode asks for something else by now."""

    number: int
    index: int  # of the turn
    turn: Turn
    history: int = 0  # of the `Asked`


@dataclass(frozen=True)
class Drop:
    """End the episode without a message about it."""

    number: int


Command = Start | Answer | Drop


@dataclass(frozen=True)
class Asked:
    """The episode asks for a turn. If there are turns from `turn` on already, they are dropped."""

    number: int
    turn: int
    observation: list[int]
    max_tokens: int
    history: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Ended:
    number: int
    finish: str
    episode: Episode
    turns: int  # that the play got. An earlier play of the episode may have got more: they are dropped


Event = Asked | Ended


def batching_s(episodes: int) -> float:
    """Seconds for which a message waits for others, because each list costs time: many episodes send many messages."""
    return min(max(episodes / 10_000, 0.01), 0.1)
