"""A model that answers from a script, for the functions that play episodes."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from rlsys.episodes.ask import EpisodeOver, Reply
from rlsys.episodes.environments import load_environment


class Scripted:
    """The `ask` of an episode. `answers` are texts, or a function of what was asked; after them its turns are over."""

    def __init__(self, answers: Iterable[str] | Callable[[Any], str]):
        self.answer = answers if callable(answers) else None
        self.script = iter(() if callable(answers) else answers)
        self.asked: list[Any] = []
        self.replies: list[Reply] = []

    async def __call__(self, content: Any) -> Reply:
        self.asked.append(content)
        await asyncio.sleep(0)  # others go on meanwhile
        text = self.answer(content) if self.answer else next(self.script, None)
        if text is None:
            raise EpisodeOver("turns")
        self.replies.append(Reply(text, "stop"))
        return self.replies[-1]

    @property
    def scores(self) -> list[float]:
        return [reply.turn_score for reply in self.replies]


def play(spec: str, row: dict[str, Any], ask: Scripted, **options: Any) -> Any:
    """Plays a whole episode, as an episode process does."""
    return asyncio.run(load_environment(spec, options)(row, ask, **options))
