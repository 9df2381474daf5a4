"""The `ask` of one episode: keeps the conversation, and the limits on turns and tokens."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.episodes.ask import EpisodeOver, Message, Reply


@dataclass(frozen=True)
class Turn:
    """A turn as it was sampled: what stood before it, and what the model wrote."""

    observation: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop | length


@dataclass(frozen=True)
class Limits:
    """Limits(max_turns=8, max_new_tokens=512, max_tokens=0, window=4096)"""

    max_turns: int
    max_new_tokens: int  # of a turn
    max_tokens: int  # that the model writes in all turns; 0: no limit
    window: int  # tokens of the whole sequence


class Conversation(Protocol):
    """What `ask` needs of `rlsys.episodes.conversation.Conversation`."""

    messages: list[Message]

    def open(self, content: str | list[Message]) -> list[int]: ...
    def continue_with(self, content: str | list[Message]) -> list[int]: ...
    def add_reply(self, tokens: Sequence[int], reply: Reply) -> None: ...


# Given an observation and the most tokens of the answer.
Sampler = Callable[[list[int], int], Awaitable[Turn]]
ReadReply = Callable[[Turn, int], Reply]  # the turn and its number


class EpisodeAsk:
    """`reply = await ask("higher")`, as a user's function calls it."""

    def __init__(self, conversation: Conversation, limits: Limits, sample: Sampler, read_reply: ReadReply):
        self.conversation, self.limits, self.sample, self.read_reply = conversation, limits, sample, read_reply
        self.replies: list[Reply] = []
        self.length = self.own_tokens = 0
        self.waiting = self.closed = False
        self.over = ""  # why the model may write no more: turns | tokens | window | time

    async def __call__(self, content: str | list[Message]) -> Reply:
        self.require_turn()
        if self.over:  # the function has caught the error, and asks again
            self.end(self.over)
        if len(self.replies) == self.limits.max_turns:
            self.end("turns")
        observation = self.conversation.continue_with(content) if self.replies else self.conversation.open(content)
        if not observation and not self.replies:
            raise ValueError("the first ask has no tokens: ask for something")
        if not self.replies and len(observation) >= self.limits.window:
            raise ValueError(
                f"the first ask has {len(observation):,} tokens and leaves no room for a reply: episode.window is "
                f"{self.limits.window:,}. Ask for less, leave the row out, or raise episode.window."
            )
        room = self.room_for_turn(len(observation))
        self.waiting = True
        try:
            turn = await self.sample(observation, room)
            reply = self.read_reply(turn, len(self.replies))
            self.conversation.add_reply(turn.tokens, reply)
        except BaseException:  # as by `wait_for`: the turn was or will be sampled, and is no reply to any later ask
            self.closed = True
            raise
        finally:
            self.waiting = False
        self.length += len(observation) + len(turn.tokens)
        self.own_tokens += len(turn.tokens)
        self.replies.append(reply)
        return reply

    def require_turn(self) -> None:
        if self.closed:
            raise RuntimeError(
                "ask was called after the episode had ended, or after an ask had been cancelled or had failed."
            )
        if self.waiting:
            raise RuntimeError(
                "ask was called while an earlier ask of this episode waits for its reply. An episode is one sequence of "
                "turns: await each ask before the next."
            )

    def room_for_turn(self, observation: int) -> int:
        """The most tokens that the next turn may have."""
        left = self.limits.window - self.length - observation
        if left < 1:
            self.end("window")
        own = self.limits.max_tokens - self.own_tokens if self.limits.max_tokens else left
        if own < 1:
            self.end("tokens")
        return min(self.limits.max_new_tokens, left, own)

    def end(self, reason: str) -> None:
        self.over = reason
        raise EpisodeOver(reason)

    @property
    def finish(self) -> str:
        """Why the episode ended: stop, length, or the limit that it has reached."""
        return self.over or (self.replies[-1].finish if self.replies else "stop")

    @property
    def turn_scores(self) -> list[float]:
        """The scores of the turns, or none if one of them is no finite number: see `Player.read_verdict`."""
        scores = [reply.turn_score for reply in self.replies]
        return list(map(float, scores)) if all(map(is_number, scores)) else []


def is_number(score: Any) -> bool:
    return isinstance(score, int | float) and abs(score) <= sys.float_info.max
