"""An episode that is being played: its turns, whichever play of it has asked for them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlsys.types import NO_TOKENS, Episode, Ints, Request, Sample, Verdict, join_turns
from workers.processes.handle import KILLED
from workers.turns.messages import Asked, Ended, Lost

NO_LOGPROBS = np.zeros(0, dtype=np.float32)
MAX_CRASHES = 2  # processes that end while an episode's code runs, and it gets no further; then the episode has failed
MAX_KILLED = 5  # of them, if all were killed: mostly by others than the episode


@dataclass(eq=False)
class SampledTurn:
    """A turn that a play has asked for. Each later play that asks for the same gets it."""

    observation: Ints
    after: int  # the turn of the episode that it continues; -1: none
    sample: Sample | None = None  # what engines wrote, or a half of it
    runs: bool = False  # engines write it

    @property
    def is_whole(self) -> bool:
        return self.sample is not None and self.sample.finish != "cut"


@dataclass(frozen=True)
class StoppedEpisode(Sample):
    """An episode that was stopped early. It goes on if it is the `partial` of a later request."""

    turn_of: dict[Any, int] = field(default_factory=dict)
    turns_so_far: tuple[SampledTurn, ...] = ()


@dataclass(eq=False)
class OpenEpisode:
    """An episode that is being played. Its turns are kept here and nowhere else.

    A play that is lost is followed by another, which gets the same turns until it asks for something else, as with a
    random environment.
    """

    request: Request
    number: int = 0  # of the present play
    sampled: list[SampledTurn] = field(
        default_factory=list
    )  # that any play has asked for, each behind the one that it continues
    turn_of: dict[Any, int] = field(default_factory=dict)  # of these, by what was asked
    asked: list[int] = field(default_factory=list)  # of these, what the present play has asked for
    waits: dict[int, Asked] = field(default_factory=dict)  # its asks without an answer, by their numbers
    crashes: int = 0  # of plays, since one got further than ever before
    killed: int = 0  # of these
    furthest: int = 0  # turns that a play had asked for at a crash

    @property
    def key(self) -> tuple[str, int]:
        return self.request.uid, self.request.index

    def add(self, asked: Asked) -> int:
        """Notes what the present play asks for. Returns the turn that answers it."""
        after = self.asked[asked.after] if asked.after >= 0 else -1
        observation = np.array(asked.observation, dtype=np.int32)
        what = (after, observation.tobytes(), asked.prefix or asked.turn)
        turn = self.turn_of.setdefault(what, len(self.sampled))
        if turn == len(self.sampled):
            self.sampled.append(SampledTurn(observation, after))
        self.asked.append(turn)
        self.waits[asked.turn] = asked
        return turn

    def tokens_before(self, turn: SampledTurn) -> Ints:
        """Returns all that the model sees before it writes a turn."""
        parts = [turn.observation]
        while turn.after >= 0:
            turn = self.sampled[turn.after]
            assert turn.sample, "what continues it was asked for when it was there"
            parts += [turn.sample.tokens, turn.observation]
        return np.concatenate([np.array(self.request.tokens, dtype=np.int32), *reversed(parts)])

    def is_cause(self, lost: Lost) -> bool:
        """Whether it is taken for the cause of the crash of its process: not at once, as the first may be a coincidence."""
        if not lost.suspect:
            return False
        if lost.turns > self.furthest:
            self.furthest, self.crashes, self.killed = lost.turns, 0, 0
        self.crashes += 1
        self.killed += lost.exit_status == KILLED
        return self.crashes >= (MAX_KILLED if self.killed == self.crashes else MAX_CRASHES)

    def sample(self, finish: str, asks: Iterable[int]) -> Sample:
        """Returns the answers to these asks of the present play."""
        empty = Sample(*self.key, "", NO_TOKENS, NO_LOGPROBS, finish, 0)
        return self.join([self.asked[ask] for ask in asks], empty)

    def answered(self) -> list[int]:
        return [ask for ask in range(len(self.asked)) if ask not in self.waits]

    def stopped(self) -> Sample:
        """Returns all turns of all plays, half-written ones too."""
        turns = [replace(turn, runs=False) for turn in self.sampled]
        empty = StoppedEpisode(
            *self.key, "", NO_TOKENS, NO_LOGPROBS, "cut", 0, turn_of=self.turn_of, turns_so_far=tuple(turns)
        )
        return self.join([i for i, turn in enumerate(turns) if turn.sample], empty)

    def join(self, turns: list[int], empty: Sample) -> Sample:
        place = {turn: i for i, turn in enumerate(turns)} | {-1: -1}
        parts = [self.sampled[turn] for turn in turns]
        return join_turns([(t.observation, place[t.after], t.sample) for t in parts if t.sample], empty)


def crashed(lost: Lost) -> Ended:
    after = f", after turn {lost.turns}" if lost.turns else ""
    verdict = Verdict(None, failure="crash", detail=f"the episode process ended: {lost.exit_status}{after}")
    return Ended(lost.number, "stop", Episode(verdict, [], []))
