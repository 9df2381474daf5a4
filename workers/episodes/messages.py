"""Messages about a play, by its number, between the driver, an episode worker and its process.

An episode that is played again gets another number: what still comes of the play before is about a number that nobody knows.
"""

from dataclasses import dataclass
from typing import Any

from rlsys.episodes.asking import Turn
from rlsys.types import Episode


@dataclass(frozen=True)
class Start:
    """Play an episode."""

    number: int
    play: str  # the function
    row: dict[str, Any]
    max_new_tokens: int  # of a turn


@dataclass(frozen=True)
class Answer:
    """A turn that the play has asked for."""

    number: int
    index: int  # of the turn
    turn: Turn


@dataclass(frozen=True)
class Drop:
    """End the play without a message about it."""

    number: int


Command = Start | Answer | Drop


@dataclass(frozen=True)
class Asked:
    """The play asks for a turn. The driver may have it already, from a play before."""

    number: int
    turn: int
    observation: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Ended:
    number: int
    finish: str
    episode: Episode
    turns: int  # that the play got. An earlier play of the episode may have got more: they are dropped


@dataclass(frozen=True)
class Lost:
    """The play was lost with its process or worker."""

    number: int
    turns: int = 0  # that it had asked for
    suspect: bool = False  # its code was running when the process crashed
    exit_status: str = ""  # of the process


Event = Asked | Ended | Lost


def batching_s(episodes: int) -> float:
    """Seconds for which a message waits for others, because each list costs time: many episodes send many messages."""
    return min(max(episodes / 10_000, 0.01), 0.1)
