"""What the user's function sees of an episode: it asks the model, and reads its replies."""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote. `ToolCall("add", {"a": 1, "b": 2})`, or with an error if it cannot be read."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    error: str = ""  # why the call cannot be read


@dataclass
class Reply:
    """A turn of the model."""

    text: str  # without special tokens, calls and reasoning
    finish: str  # stop | length
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the tokens, if they were asked for
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    raw: str = ""  # all that the model wrote, special tokens included
    turn_score: float = 0.0

    def score(self, value: float) -> None:
        """Adds to the score of this turn."""
        self.turn_score = float(self.turn_score + value)  # the value may be a number of numpy or torch


class Ask(Protocol):
    """Asks the model for its next turn.

    It sees the conversation up to its last turn, and the content. `after` is an earlier reply: it sees what was up to that
    one instead. `after=None`: it sees the content alone. The reply has `logprobs` if they are asked for.
    """

    def __call__(
        self, content: str | list[Message], after: Reply | None = ..., logprobs: bool = False
    ) -> Awaitable[Reply]: ...


class EpisodeOver(Exception):
    """The episode has used up its turns, its tokens or its window. `reason`: turns | tokens | window."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f"the episode is over: it has used up its {reason}")
