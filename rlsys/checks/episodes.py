"""Checks what plays the episodes, and the limits that they have."""

from collections.abc import Iterator

from rlsys.config.plugins import user_function_problems
from rlsys.config.schema import Config
from rlsys.config.shorthand import GYM
from rlsys.episodes.environments import ENVIRONMENTS, check_environment, is_environment
from rlsys.episodes.player import PLAYS
from rlsys.episodes.settings import TOOL_PLAY, plays
from rlsys.episodes.tools import tool_problems
from rlsys.errors import ConfigError


def check_episode(c: Config) -> Iterator[str]:
    named = {"episode.play": c.episode.play}
    for key, sources in (("data.train", c.data.train), ("eval.datasets", c.eval.datasets)):
        named |= {f"{key}.{name}.episode": source.episode for name, source in sources.items()}
    for key, play in named.items():
        if play and (key == "episode.play" or play != c.episode.play):
            yield from play_problems(key, play, c)
    yield from tool_problems(c.episode.tools)
    if plays(c):
        yield from limit_problems(c)
    elif c.episode.options:
        yield "episode.options is set, and nothing plays an episode. Give episode.play, or leave the options out."


def play_problems(key: str, play: str, c: Config) -> Iterator[str]:
    if is_environment(play):
        try:
            check_environment(play, c.episode.options)
        except ConfigError as error:
            yield from (f"{key}: {problem}" for problem in error.problems)
    elif play.startswith(GYM):
        yield f"{key}: `{play}` is a data set with a score, and no episode. Name it in data.train, and leave {key} out."
    elif ":" not in play and play not in PLAYS:
        kinds = ", ".join(f"{name}:NAME" for name in ENVIRONMENTS)
        yield f"{key}: `{play}` is not known. Built in: {', '.join(PLAYS)}. Or give module:function, path/to/file.py:function, {kinds}."
    elif play == "command":
        if not c.episode.options.get("command"):
            yield "episode.command is missing: the program that plays, such as python agent.py {task}."
        yield from user_function_problems("episode.grade", str(c.episode.options.get("grade", "")))
    elif play not in PLAYS:
        yield from user_function_problems(key, play)


def limit_problems(c: Config) -> Iterator[str]:
    e = c.episode
    if e.step_timeout_s > e.timeout_s:
        yield (
            f"episode.step_timeout_s ({e.step_timeout_s:g}) is more than episode.timeout_s ({e.timeout_s:g}), which is "
            "for all steps together. Use a shorter one, or a longer timeout_s."
        )
    tools_s = e.options.get("timeout_s", 0)
    if TOOL_PLAY in plays(c) and isinstance(tools_s, int | float) and tools_s >= e.step_timeout_s:
        yield (
            f"episode.options.timeout_s ({tools_s:g}), for calls of tools, is not less than episode.step_timeout_s "
            f"({e.step_timeout_s:g}): the episode would fail before the model hears of a call that hangs."
        )
    if e.max_tokens >= e.window:
        yield (
            f"episode.max_tokens ({e.max_tokens}) cannot be reached in episode.window ({e.window}), which also has what "
            "the environment says. Use a larger window, or 0."
        )
