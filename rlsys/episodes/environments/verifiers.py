"""`verifiers:TASKSET`: environments of the package verifiers (its `verifiers.v1`), with their tasks and rewards.

    data: {train: verifiers:my_taskset}        # its tasks, which are played by this

The package runs the episode: its environment, stops, limits and rewards. Its model is our `ask`.

    Env.run ──▶ chat loop (ChatHarness) ──HTTP on loopback──▶ the package's server (AskServer) ──▶ ask
"""

import copy
import functools
from typing import Any

from rlsys.episodes.ask import Ask, EpisodeOver
from rlsys.episodes.environments.package import first_line, import_package
from rlsys.errors import ConfigError
from rlsys.tasks.taskset import FIELD, make_taskset


async def play(name: str, row: dict[str, Any], ask: Ask, /) -> dict[str, float] | float | None:
    if FIELD not in row or row[FIELD][0] != name:
        raise ValueError(
            f"the row is not a task of verifiers:{name}; it plays the rows of `data.train: verifiers:{name}`."
        )
    _, settings, data = row[FIELD]
    bridge = import_bridge(name)
    env = copy.copy(make_env(name, settings))
    episode, over = await bridge.run_episode(env, bridge.make_task(env, data), ask)
    if episode.errors or not episode.traces or not all(trace.ok for trace in episode.traces):
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if over:
            raise EpisodeOver(over)
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has no trace")
    rewards = {key: reward.value for key, reward in episode.traces[0].rewards.items() if reward is not None}
    return rewards or None


def check(name: str, options: dict[str, Any]) -> None:
    if options:
        raise ConfigError(
            f"episode.options.{next(iter(options))}: verifiers:{name} takes its configuration from the data set: "
            f"data.train: {{verifiers:{name}: {{…}}}}."
        )
    bridge = import_bridge(name)
    try:
        bridge.make_env(name, "{}")
    except ConfigError:
        raise
    except Exception as error:  # making it runs its code
        if type(error).__name__ != "ValidationError":  # options that it cannot do without are those of the data set
            raise ConfigError(f"verifiers:{name}: {first_line(error)}.") from None


def import_bridge(name: str) -> Any:
    import_package("verifiers.v1", f"verifiers:{name}", "verifiers")
    from rlsys.episodes.environments import verifiers_bridge

    return verifiers_bridge


@functools.lru_cache(maxsize=16)
def make_env(name: str, settings: str) -> Any:
    """Makes the environment, with our chat loop as its only agent. Raises `ConfigError` if it needs more than that."""
    make_taskset(name, settings)
    return import_bridge(name).make_env(name, settings)
