"""Where each worker's process is, so that it can be looked at, or ended, when it answers no more."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

SHARED = ("/dev/shm/psm_", "/dev/shm/vllm_")  # as Python and vLLM name them
PATIENCE_S = 15.0  # with a node that is asked


@dataclass(frozen=True)
class Place:
    """Written by the worker itself, into `logs/rollout-0.pid`."""

    node: str  # Ray's id
    pid: int
    began: float  # when the process was created: numbers of processes are used again
    shared: list[str] = field(default_factory=list)  # files in /dev/shm that nobody removes if it is killed


def tell(name: str, logs: Path) -> None:
    """Called in a worker; again, when it has started processes of its own."""
    own = psutil.Process()
    place = Place(ray.get_runtime_context().get_node_id(), own.pid, own.create_time(), shared(own))
    with contextlib.suppress(OSError):  # on another host without the run directory
        (logs / f"{name}.pid").write_text(json.dumps(asdict(place)))


def place_of(name: str, logs: Path) -> Place | None:
    try:
        return Place(**json.loads((logs / f"{name}.pid").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def shared(parent: psutil.Process) -> list[str]:
    """Files in /dev/shm through which processes that it started talk to each other."""
    found = set()
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {m.path for m in process.memory_maps() if m.path.startswith(SHARED)}
    return sorted(path for path in found if os.path.exists(path))  # not those that are unlinked already


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
    unlink(place)


def unlink(place: Place) -> None:
    for file in place.shared:
        if any(file.startswith(start) and "/" not in file.removeprefix(start) for start in SHARED):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another user's by now
                Path(file).unlink()


def tidy(names: Iterable[str], logs: Path) -> None:
    """Removes what workers that have ended left in /dev/shm: here, and on other hosts as far as they answer."""
    places = {name: place for name in names if (place := place_of(name, logs)) and place.shared}
    for place in places.values():
        unlink(place)  # names of such files are random
    if ray.is_initialized():
        here = ray.get_runtime_context().get_node_id()
        away = {name: place for name, place in places.items() if place.node != here}
        on_their_hosts(unlink, dict.fromkeys(away, ()), away)


def forget(logs: Path) -> None:
    """Of workers of a driver that was killed: what they left in /dev/shm here, then where they were."""
    files = list(logs.glob("*.pid"))
    tidy((file.stem for file in files), logs)
    for file in files:
        file.unlink()
