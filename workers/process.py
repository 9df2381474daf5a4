"""What every worker process does first, and how the driver waits for workers."""

import faulthandler
import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlsys.config import ConfigError


class WorkerFailed(RuntimeError):
    """A worker died, raised, or did not answer. The sentence names it, its own words and its log."""


def settle(name: str, logs: str) -> None:
    """Sends this process's output, libraries' chatter included, to its own file in the run directory."""
    try:
        file = os.open(Path(logs) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # on another host without the run directory: Ray's own logs keep the output
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()


def gather(calls: Mapping[str, Any], doing: str, timeout_s: float, logs: Path) -> dict[str, Any]:
    """The answers of `{worker name: object ref}`. The first failure is raised at once, with the tail of that worker's log."""
    names = {ref: name for name, ref in calls.items()}
    answers: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    while pending := [ref for ref, name in names.items() if name not in answers]:
        ready, _ = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(names[ref] for ref in pending)
            raise WorkerFailed(
                f"{doing}: no answer from {late} after {timeout_s:g} s (cluster.call_timeout_s or start_timeout_s). Logs: {logs}"
            )
        name = names[ready[0]]
        try:
            answers[name] = ray.get(ready[0])
        except RayError as error:
            raise explain(error, name, doing, logs) from None
    return {name: answers[name] for name in calls}


def explain(error: RayError, name: str, doing: str, logs: Path) -> Exception:
    """The root cause of a failed call: the worker's own exception, or what its log says last."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ConfigError):
            return error.cause
        return WorkerFailed(
            f"{doing}: {name} raised {type(error.cause).__name__}: {error.cause}\n{error}\nIts log: {logs / name}.log"
        )
    what = "died" if isinstance(error, RayActorError) else "failed"
    return WorkerFailed(f"{doing}: {name} {what}: {error}\n{tail(logs / f'{name}.log')}")


def tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"(no log at {log})"
    return f"Last lines of {log}:\n" + "\n".join(
        "  " + line for line in log.read_text(errors="replace").splitlines()[-lines:]
    )


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("", 0))
        port: int = s.getsockname()[1]
        return port


def port_is_taken(port: int) -> bool:
    with closing(socket.socket()) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return True
    return False
