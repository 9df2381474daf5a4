"""Messages about a play, by its number, between an engine, an episode worker and its process.

An episode that is played again gets another number: what still comes of the play before is about a number that nobody knows.
"""

from dataclasses import dataclass, field
from typing import Any

from rlsys.types import Episode, Floats, Ints

LINE_BITS = 32  # a play's number is that of its line, which leads to one process of an engine, and these bits


@dataclass(frozen=True)
class Start:
    """Play an episode."""

    number: int
    play: str  # the function
    row: dict[str, Any]
    max_new_tokens: int  # of a turn
    sampling: dict[str, float] = field(default_factory=dict)  # how turns are sampled, for those who ask for it


@dataclass(frozen=True)
class Answer:
    """A turn that the play has asked for."""

    number: int
    asked: int  # which of its asks
    tokens: Ints  # arrays: lists would cost the engine as much as all else that it does for a turn
    logprobs: Floats | None  # if the play has asked for them
    finish: str


@dataclass(frozen=True)
class Drop:
    """End the play without a message about it."""

    number: int


@dataclass(frozen=True)
class EndLine:
    """End all plays of this line: its engine was lost."""

    number: int


Command = Start | Answer | Drop | EndLine


@dataclass(frozen=True)
class Asked:
    """The play asks for a turn. The engine may have written it already, for a play before."""

    number: int
    turn: int  # of the play, counted from 0
    observation: list[int]
    after: int  # the turn that it continues; -1: none
    max_tokens: int
    stop: tuple[str, ...] = ()  # strings that end the turn
    prefix: int = 0  # a hash of all that is asked, for turns that may come in another order in the next play
    logprobs: bool = False  # of its tokens are wanted


@dataclass(frozen=True)
class Ended:
    number: int
    finish: str
    episode: Episode
    turns: tuple[int, ...] | None = (
        None  # that the play got, in the order of its transcript; None: all, as it asked for them
    )


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
