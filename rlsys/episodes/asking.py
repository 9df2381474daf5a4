"""The `ask` of one episode: keeps the conversation, and the limits on turns and tokens."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.episodes.ask import EpisodeOver, Message, Reply


@dataclass(frozen=True)
class Turn:
    """A turn as it was sampled."""

    tokens: list[int]
    logprobs: list[float] | None  # if they were asked for
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
    tools: Sequence[Any]  # that the model is told of

    def copy(self) -> "Conversation": ...
    def open(self, content: str | list[Message]) -> list[int]: ...
    def continue_with(self, content: str | list[Message]) -> list[int]: ...
    def add_reply(self, tokens: Sequence[int], reply: Reply) -> None: ...


@dataclass(frozen=True)
class TurnRequest:
    """A turn that is to be sampled. TurnRequest(2, observation=[…], after=1, max_tokens=64)"""

    turn: int  # of the play, counted from 0
    observation: list[int]
    after: int  # the turn that it continues; -1: none
    max_tokens: int
    stop: tuple[str, ...] = ()  # strings that end it
    prefix: int = 0  # a hash of all that is asked, for turns that may come in another order in the next play
    logprobs: bool = False  # of its tokens are wanted


Sampler = Callable[[TurnRequest], Awaitable[Turn]]
ReadReply = Callable[[Turn, int, Sequence[Any]], Reply]  # the turn, its number, and the tools that the model had


@dataclass(eq=False)
class Question:
    """What the model is asked: the turn that it continues, and what is said after that."""

    earlier: "HeldTurn | None"
    conversation: Conversation  # with what is said
    new_messages: list[Message]  # what is said
    observation: list[int]  # the tokens of it
    length: int  # of all tokens up to the answer


@dataclass(eq=False)
class HeldTurn:
    """A question with its answer, which later ones may continue."""

    number: int  # of the ask
    question: Question
    turn: Turn
    reply: Reply

    @property
    def length(self) -> int:
        return self.question.length + len(self.turn.tokens)


LAST = Reply("", "")  # stands for the last reply


class EpisodeAsk:
    """`reply = await ask("higher")`, as a user's function calls it: see `rlsys.episodes.ask.Ask`."""

    def __init__(
        self,
        new_conversation: Callable[[Sequence[Any]], Conversation],
        limits: Limits,
        sample: Sampler,
        read_reply: ReadReply,
        tools: Sequence[Any] = (),
    ):
        self.new_conversation, self.limits, self.sample, self.read_reply = new_conversation, limits, sample, read_reply
        self.tools = tools  # that the model is told of
        self.turns: list[HeldTurn] = []  # as they were answered
        self.unanswered: list[Question] = []  # the last one, if a limit kept the model from answering
        self.asked = self.own_tokens = 0
        self.waiting = self.closed = False
        self.over = ""  # why the model may write no more: turns | tokens | window | time

    async def __call__(self, content: str | list[Message], after: Reply | None = LAST, logprobs: bool = False) -> Reply:
        self.require_turn()
        earlier = self.find_turn(after)
        self.require_turns_left()
        question = self.pose(earlier, content)
        room = self.room_for(question)
        self.waiting = True
        try:
            return (await self.take_turn(self.count_ask(), question, room, logprobs=logprobs)).reply
        except BaseException:  # as by `wait_for`: the turn was or will be sampled, and is no reply to any later ask
            self.closed = True
            raise
        finally:
            self.waiting = False

    def pose(
        self, earlier: HeldTurn | None, content: str | list[Message], tools: Sequence[Any] | None = None
    ) -> Question:
        """Writes what is said after a turn, or at the beginning."""
        if earlier:
            conversation, known = earlier.question.conversation.copy(), len(earlier.question.conversation.messages)
            observation = conversation.continue_with(content)
        else:
            conversation, known = self.new_conversation(self.tools if tools is None else tools), 0
            observation = conversation.open(content)
            if not observation:
                raise ValueError("the first ask has no tokens: ask for something")
        length = len(observation) + (earlier.length if earlier else 0)
        return Question(earlier, conversation, conversation.messages[known:], observation, length)

    def count_ask(self) -> int:
        self.asked += 1
        return self.asked - 1

    async def take_turn(
        self,
        number: int,
        question: Question,
        max_tokens: int,
        stop: Sequence[str] = (),
        prefix: int = 0,
        logprobs: bool = False,
    ) -> HeldTurn:
        after = question.earlier.number if question.earlier else -1
        asked = TurnRequest(number, question.observation, after, max_tokens, tuple(stop), prefix, logprobs)
        turn = await self.sample(asked)
        reply = self.read(turn, number, question, stop)
        question.conversation.add_reply(turn.tokens, reply)
        self.turns.append(HeldTurn(number, question, turn, reply))
        self.own_tokens += len(turn.tokens)
        return self.turns[-1]

    def read(self, turn: Turn, number: int, question: Question, stop: Sequence[str]) -> Reply:
        return self.read_reply(turn, number, question.conversation.tools)

    @property
    def replies(self) -> list[Reply]:
        return [turn.reply for turn in self.turns]

    @property
    def in_order(self) -> list[HeldTurn]:
        """The turns as they are trained."""
        return self.turns

    @property
    def messages(self) -> list[Message]:
        """All that was said. One after which the model goes on from elsewhere than its last turn says from where."""
        messages: list[Message] = []
        place: dict[HeldTurn | None, int] = {None: -1}
        turns = self.in_order
        for i, question in enumerate([*(turn.question for turn in turns), *self.unanswered]):
            *others, last = question.new_messages
            after = place[question.earlier]
            messages += [*others, last if after == i - 1 else last | {"after": after}]
            if i < len(turns):
                messages.append(question.conversation.messages[-1])
                place[turns[i]] = i
        return messages

    def find_turn(self, reply: Reply | None) -> HeldTurn | None:
        """Returns the turn that gave a reply; None for None, and before the first turn."""
        if reply is LAST:
            return self.turns[-1] if self.turns else None
        if reply is None:
            return None
        for turn in self.turns:
            if turn.reply is reply:
                return turn
        raise ValueError("`after` must be a reply of this episode, or None.")

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

    def require_turns_left(self) -> None:
        if self.over:  # the function has caught the error, and asks again
            self.end(self.over)
        if self.asked == self.limits.max_turns:
            self.end("turns")

    def room_for(self, question: Question) -> int:
        """Returns the most tokens that the answer may have."""
        if not self.asked and question.length >= self.limits.window:
            raise ValueError(
                f"the first ask has {question.length:,} tokens and leaves no room for a reply: episode.window is "
                f"{self.limits.window:,}. Ask for less, leave the row out, or raise episode.window."
            )
        self.unanswered = [question]
        left = self.limits.window - question.length
        if left < 1:
            self.end("window")
        own = self.limits.max_tokens - self.own_tokens if self.limits.max_tokens else left
        if own < 1:
            self.end("tokens")
        self.unanswered = []
        return min(self.limits.max_new_tokens, left, own)

    def end(self, reason: str) -> None:
        self.over = reason
        raise EpisodeOver(reason)

    @property
    def finish(self) -> str:
        """Why the episode ended: stop, length, or the limit that it has reached."""
        return self.over or (self.in_order[-1].reply.finish if self.turns else "stop")

    @property
    def turn_scores(self) -> list[float]:
        """The scores of the turns, or none if one of them is no finite number: see `Player.read_verdict`."""
        scores = [turn.reply.turn_score for turn in self.in_order]
        return list(map(float, scores)) if all(map(is_number, scores)) else []


def is_number(score: Any) -> bool:
    return isinstance(score, int | float) and abs(score) <= sys.float_info.max
