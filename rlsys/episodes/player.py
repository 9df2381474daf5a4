"""Plays a user's function: checks and calls it, reads what it returns, and says what went wrong."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.config.plugins import load_function, short_name
from rlsys.config.secrets import referenced_variables, resolve_env
from rlsys.episodes import command_play, tool_play
from rlsys.episodes.ask import Reply
from rlsys.episodes.asking import EpisodeAsk, Turn, is_number
from rlsys.episodes.conversation import Conversation, ConversationTemplate
from rlsys.episodes.environments import environment_name, is_environment, load_environment
from rlsys.episodes.settings import TOOL_PLAY, EpisodeSettings
from rlsys.episodes.tools import Toolbox
from rlsys.episodes.tools.toolbox import close_all
from rlsys.errors import ConfigError
from rlsys.rewards.weighted_reward import exception_verdict, invalid_verdict, read_verdict, show
from rlsys.tasks import guess
from rlsys.types import Verdict

PLAYS: dict[str, Any] = {
    TOOL_PLAY: tool_play.play,
    "command": command_play.play,
    "guess": guess.play,
    "guess_scored": guess.play_scored,
}  # built in

TOOLS_SHARE = (
    0.8  # of a step's time is for the calls of tools: the model hears of one that hangs, and the episode goes on
)


class ReplyReader(Protocol):
    """What a player needs of `rlsys.episodes.parsing.ReplyParser`."""

    def parse(
        self, tokens: Sequence[int], finish: str, turn: int = 0, logprobs: list[float] | None = None
    ) -> Reply: ...


@dataclass(frozen=True)
class Equipment:
    """What all functions of a process share: how conversations are written and read, and the model's tools."""

    template: ConversationTemplate
    reader: Callable[[Sequence[dict[str, Any]]], ReplyReader]  # of replies of a model that was told of these tools
    toolbox: Toolbox
    schemas: list[dict[str, Any]]  # of the tools of the configuration
    tool_parser: str = ""  # for other tools


class Player:
    """One function, with its options, for all its episodes."""

    def __init__(self, spec: str, settings: EpisodeSettings, equipment: Equipment):
        self.equipment, self.options = equipment, resolve_env(settings.options)
        if is_environment(spec):
            self.name, self.function = environment_name(spec), load_environment(spec, settings.options)
        else:
            self.name, self.function = short_name(spec), load_function(spec, PLAYS, "episode.play")
        self.secret_variables = referenced_variables(settings.options)
        if spec == TOOL_PLAY:
            timeout_s = TOOLS_SHARE * settings.step_timeout_s
            self.options = {"timeout_s": timeout_s} | self.options | {"on_bad_call": settings.on_bad_call}
        if self.function is command_play.play:
            self.options = command_play.prepare(self.options)
        parameters = inspect.signature(self.function).parameters
        self.takes_tools, self.takes_session = "tools" in parameters, "session" in parameters
        require_playable(spec, self.function, self.options | ({"tools": []} if self.takes_tools else {}))

    def new_conversation(self, tools: Sequence[dict[str, Any]]) -> Conversation:
        return Conversation(self.equipment.template, tools)

    async def play(self, row: dict[str, Any], ask: EpisodeAsk) -> Any:
        """Calls the function, with the tools of this episode if it takes them."""
        if not self.takes_tools:
            return await self.call(row, ask, **self.options)
        tools = await self.equipment.toolbox.open(row)
        try:
            return await self.call(row, ask, tools=tools, **self.options)
        finally:
            await close_all(tools)

    async def call(self, row: dict[str, Any], ask: EpisodeAsk, **options: Any) -> Any:
        """Calls the function; one that is not `async` may block, and gets a thread."""
        if is_async(self.function):
            return await self.function(row, ask, **options)
        return await asyncio.to_thread(self.function, row, ask, **options)

    def read_reply(self, turn: Turn, number: int, tools: Sequence[dict[str, Any]]) -> Reply:
        return self.equipment.reader(tools).parse(turn.tokens, turn.finish, number, turn.logprobs)

    def read_verdict(self, returned: Any, ask: EpisodeAsk) -> Verdict | None:
        """Reads what the function returned, with the scores of turns. None: it leaves the score to reward functions."""
        if not ask.replies:
            return invalid_verdict(f"{self.name} returned without a reply of the model.")
        if wrong := next((r for r in ask.replies if not is_number(r.turn_score)), None):
            return invalid_verdict(
                f"{self.name}: a turn has the score {show(wrong.turn_score)}; it must be a finite number."
            )
        scores = ask.turn_scores
        turns = {"turns": float(sum(scores))} if any(scores) else {}
        if returned is None:
            return Verdict(turns["turns"], turns) if turns else None
        verdict = read_verdict(self.name, 1.0, returned)
        if verdict.score is None or not turns:
            return verdict
        return Verdict(verdict.score + turns["turns"], verdict.components | turns, answer=verdict.answer)

    def error_verdict(self, error: BaseException, ask: EpisodeAsk) -> Verdict:
        return exception_verdict(self.describe_moment(ask), error, self.secret_variables)

    def describe_moment(self, ask: EpisodeAsk) -> str:
        """ "play, after turn 3" """
        return f"{self.name}, {f'after turn {len(ask.replies)}' if ask.replies else 'before its first turn'}"

    def transcript(self, ask: EpisodeAsk) -> list[Any]:
        return list(ask.messages)


def is_async(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  an object may be the function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def require_playable(spec: str, function: Any, options: dict[str, Any]) -> None:
    """Raises `ConfigError` if `function(row, ask, **options)` cannot be called."""
    if not is_async(function) and "session" not in inspect.signature(function).parameters:
        raise ConfigError(
            f"episode.play: `{spec}` must be written `async def {short_name(spec)}(row, ask)`, without yield: it awaits "
            "the model. A function `(row, session)`, whose client asks the model, need not be async."
        )
    try:
        inspect.signature(function).bind({}, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"episode.play: `{spec}` cannot be called with (row, ask) and episode.options: {error}."
        ) from None
