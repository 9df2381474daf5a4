"""Environments of other packages, by name: `episode: gymnasium:FrozenLake-v1`.

Each has `check(name, options)`, which raises `ConfigError`, and `async def play(name, row, ask, **options)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlsys.config.plugins import short_name
from rlsys.config.secrets import redact, referenced_variables, resolve_env
from rlsys.episodes.environments import gymnasium, openenv, textarena, verifiers
from rlsys.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    check: Callable[[str, dict[str, Any]], None]
    play: Callable[..., Any]
    reach: Callable[[str], None] = lambda name: None  # raises `ConfigError` for a server that does not answer


ENVIRONMENTS = {  # by what stands in front of the colon
    "gymnasium": Environment(gymnasium.check, gymnasium.play),
    "openenv": Environment(openenv.check, openenv.play, openenv.reach),
    "textarena": Environment(textarena.check, textarena.play),
    "verifiers": Environment(verifiers.check, verifiers.play),
}


def is_environment(spec: str) -> bool:
    return spec.partition(":")[0] in ENVIRONMENTS and ":" in spec


def check_environment(spec: str, options: dict[str, Any]) -> None:
    """Raises `ConfigError` for a package that is missing, a name it does not have, or options that do not fit.

    The values of `${oc.env:NAME}` in the options appear in no message.
    """
    kind, _, name = spec.partition(":")
    try:
        ENVIRONMENTS[kind].check(name, resolve_env(options))
    except ConfigError as error:
        raise ConfigError([redact(problem, referenced_variables(options)) for problem in error.problems]) from None


def load_environment(spec: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Returns the function that plays it, `play(row, ask, **options)`. Raises `ConfigError` if it cannot be played."""
    check_environment(spec, options)
    kind, _, name = spec.partition(":")
    ENVIRONMENTS[kind].reach(name)
    return partial(ENVIRONMENTS[kind].play, name)


def environment_name(spec: str) -> str:
    """Its name in metrics.  "gymnasium:Taxi-v3" -> "Taxi-v3"    "openenv:http://host:8000" -> "openenv" """
    return spec.partition(":")[0] if "://" in spec else short_name(spec)
