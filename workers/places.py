"""Where each worker's process is, so that it can be looked at, or ended, when it answers no more."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

PATIENCE_S = 15.0  # with a node that is asked


@dataclass(frozen=True)
class Place:
    """Written by the worker itself, into `logs/rollout-0.pid`."""

    node: str  # Ray's id
    pid: int
    began: float  # when the process was created: numbers of processes are used again


def tell(name: str, logs: Path) -> None:
    """Called in a worker."""
    place = Place(ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time())
    with contextlib.suppress(OSError):  # on another host without the run directory
        (logs / f"{name}.pid").write_text(json.dumps(asdict(place)))


def place_of(name: str, logs: Path) -> Place | None:
    try:
        return Place(**json.loads((logs / f"{name}.pid").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def process_at(place: Place) -> psutil.Process | None:
    """On the host it is at."""
    try:
        process = psutil.Process(place.pid)
        return process if process.create_time() == place.began else None
    except psutil.Error:
        return None


def on_their_hosts(
    ask: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], places: Mapping[str, Place]
) -> dict[str, Any]:
    """`ask(place, *arguments[name])` where each worker's process is; without those whose node does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    found, asked = {}, {}
    for name, place in places.items():
        if place.node == here:
            found[name] = ask(place, *arguments[name])
        else:
            there = NodeAffinitySchedulingStrategy(place.node, soft=False)
            task = ray.remote(ask).options(num_cpus=0, scheduling_strategy=there)
            asked[task.remote(place, *arguments[name])] = name
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE_S) if asked else ([], [])
    for ref in ready:
        with contextlib.suppress(RayError):
            found[asked[ref]] = ray.get(ref)
    return found


def end(actors: Mapping[str, Any], logs: Path) -> None:
    """For good: actors that nobody will call again."""
    for actor in actors.values():
        with contextlib.suppress(RayError):
            ray.kill(actor)
    end_processes(list(actors), logs)


def end_processes(names: list[str], logs: Path) -> None:
    """Also of one that was stopped, and hears nothing."""
    places = {name: place for name in names if (place := place_of(name, logs))}
    on_their_hosts(kill, dict.fromkeys(places, ()), places)


def kill(place: Place) -> None:
    if process := process_at(place):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
