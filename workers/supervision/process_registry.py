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

SHARED_MEMORY_PREFIXES = ("/dev/shm/psm_", "/dev/shm/vllm_")  # as Python and vLLM name them
NODE_TIMEOUT_S = 15.0  # with a node that is asked


@dataclass(frozen=True)
class ProcessInfo:
    """Written by the worker itself, into `logs/rollout-0.pid`."""

    node: str  # Ray's id
    pid: int
    created: float  # when the process was created: numbers of processes are used again
    shared_memory: list[str] = field(default_factory=list)  # files in /dev/shm that nobody removes if it is killed


def register_process(name: str, logs: Path) -> None:
    """Called in a worker; again, when it has started processes of its own."""
    own = psutil.Process()
    place = ProcessInfo(ray.get_runtime_context().get_node_id(), own.pid, own.create_time(), find_shared_memory(own))
    with contextlib.suppress(OSError):  # on another host without the run directory
        (logs / f"{name}.pid").write_text(json.dumps(asdict(place)))


def read_process_info(name: str, logs: Path) -> ProcessInfo | None:
    try:
        return ProcessInfo(**json.loads((logs / f"{name}.pid").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_shared_memory(parent: psutil.Process) -> list[str]:
    """Files in /dev/shm through which processes that it started talk to each other."""
    found = set()
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {m.path for m in process.memory_maps() if m.path.startswith(SHARED_MEMORY_PREFIXES)}
    return sorted(path for path in found if os.path.exists(path))  # not those that are unlinked already


def find_process(place: ProcessInfo) -> psutil.Process | None:
    """On the host it is at."""
    try:
        process = psutil.Process(place.pid)
        return process if process.create_time() == place.created else None
    except psutil.Error:
        return None


def run_on_nodes(
    ask: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], places: Mapping[str, ProcessInfo]
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
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_TIMEOUT_S) if asked else ([], [])
    for ref in ready:
        with contextlib.suppress(RayError):
            found[asked[ref]] = ray.get(ref)
    return found


def kill_actors(actors: Mapping[str, Any], logs: Path) -> None:
    """For good: actors that nobody will call again."""
    for actor in actors.values():
        with contextlib.suppress(RayError):
            ray.kill(actor)
    kill_processes(list(actors), logs)


def kill_processes(names: list[str], logs: Path) -> None:
    """Also of one that was stopped, and hears nothing."""
    places = {name: place for name in names if (place := read_process_info(name, logs))}
    run_on_nodes(kill_process, dict.fromkeys(places, ()), places)


def kill_process(place: ProcessInfo) -> None:
    if process := find_process(place):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    unlink_shared_memory(place)


def unlink_shared_memory(place: ProcessInfo) -> None:
    for file in place.shared_memory:
        if any(file.startswith(start) and "/" not in file.removeprefix(start) for start in SHARED_MEMORY_PREFIXES):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another user's by now
                Path(file).unlink()


def remove_shared_memory(names: Iterable[str], logs: Path) -> None:
    """Removes what workers that have ended left in /dev/shm: here, and on other hosts as far as they answer."""
    places = {name: place for name in names if (place := read_process_info(name, logs)) and place.shared_memory}
    for place in places.values():
        unlink_shared_memory(place)  # names of such files are random
    if ray.is_initialized():
        here = ray.get_runtime_context().get_node_id()
        away = {name: place for name, place in places.items() if place.node != here}
        run_on_nodes(unlink_shared_memory, dict.fromkeys(away, ()), away)


def clear_registry(logs: Path) -> None:
    """Of workers of a driver that was killed: what they left in /dev/shm here, then where they were."""
    files = list(logs.glob("*.pid"))
    remove_shared_memory((file.stem for file in files), logs)
    for file in files:
        file.unlink()
