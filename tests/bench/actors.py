"""Ray actors of workers, called so that mypy sees a method that is gone or takes other arguments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import ray

from rlsys.config.schema import Config

P = ParamSpec("P")


def spawn(worker: type, config: Config, index: int, logs: Path, environment: dict[str, str]) -> Any:
    """Starts a worker that takes no share of Ray's CPUs."""
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    return ray.remote(worker).options(**options).remote(config, index, str(logs))


def call(actor: Any, method: Callable[Concatenate[Any, P], object], *arguments: P.args, **options: P.kwargs) -> Any:
    """Returns a reference to the answer. `call(rank, PolicyRank.send, 0)` is `rank.send.remote(0)`."""
    return getattr(actor, method.__name__).remote(*arguments, **options)
