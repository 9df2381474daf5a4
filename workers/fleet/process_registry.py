"""Where each worker's process runs, so that a worker that no longer answers can be inspected or killed."""

import contextlib
import json
import os
import signal
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from workers.fleet.cluster import Actor, CallFailed, Cluster
from workers.fleet.ray_cluster import RayCluster, is_connected, node_id, run_on_node

SHARED_MEMORY_PREFIXES = ("/dev/shm/psm_", "/dev/shm/vllm_")  # Python's and vLLM's
NODE_TIMEOUT_S = 15.0  # for a node to answer


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's process. The worker writes it to `logs/rollout-0.pid`."""

    node: str  # Ray's id
    pid: int
    created: float  # when the process was created: pids are reused
    shared_memory: list[str] = field(default_factory=list)  # files in /dev/shm that stay if it is killed
    log: str = ""  # where its output goes; set by the reader


def register_process(name: str, logs: Path) -> None:
    """Writes this process's `ProcessInfo`. A worker calls it again once it has started processes of its own."""
    process = psutil.Process()
    info = ProcessInfo(node_id(), process.pid, process.create_time(), find_shared_memory(process))
    with contextlib.suppress(OSError):  # on another host without the run directory
        (logs / f"{name}.pid").write_text(json.dumps(asdict(info)))


def read_process_info(name: str, logs: Path) -> ProcessInfo | None:
    try:
        info = ProcessInfo(**json.loads((logs / f"{name}.pid").read_text()))
        return replace(info, log=str(logs / f"{name}.log"))
    except (OSError, ValueError, TypeError):
        return None


def read_process_infos(names: Iterable[str], logs: Path) -> dict[str, ProcessInfo]:
    """Returns the `ProcessInfo` of every worker that has written one."""
    return {name: info for name in names if (info := read_process_info(name, logs))}


def find_shared_memory(parent: psutil.Process) -> list[str]:
    """Returns the files in /dev/shm that processes started by `parent` have mapped."""
    files = set()
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            files |= {m.path for m in process.memory_maps() if m.path.startswith(SHARED_MEMORY_PREFIXES)}
    return sorted(file for file in files if os.path.exists(file))  # without those already unlinked


def find_process(info: ProcessInfo) -> psutil.Process | None:
    """Returns the process, on the host where it runs, unless it has ended or is not a worker of the run."""
    try:
        process = psutil.Process(info.pid)
        return process if process.create_time() == info.created and is_worker(process, info.log) else None
    except (psutil.Error, OSError):
        return None


def is_worker(process: psutil.Process, log: str) -> bool:
    """Returns whether the process is of this user, and its output goes to the worker's log.

    Whoever can write to `logs` can put any process into a `.pid` file, but cannot change where that process writes.
    """
    file = os.lstat(log)  # a link could lead to where the process writes
    if process.uids().real != os.getuid() or not stat.S_ISREG(file.st_mode):
        return False
    # stderr too: while gloo connects, vLLM leads stdout elsewhere.
    return any(os.path.samestat(os.stat(f"/proc/{process.pid}/fd/{fd}"), file) for fd in (1, 2))


def run_on_nodes(
    function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], infos: Mapping[str, ProcessInfo]
) -> dict[str, Any]:
    """Runs `function(info, *arguments[name])` on each worker's node. Leaves out nodes that do not answer."""
    if not infos:
        return {}
    this_node, cluster = node_id(), RayCluster()
    results, names = {}, {}
    for name, info in infos.items():
        if info.node == this_node:
            results[name] = function(info, *arguments[name])
        else:
            names[run_on_node(info.node, function, info, *arguments[name])] = name
    for call in cluster.wait(list(names), len(names), NODE_TIMEOUT_S) if names else []:
        with contextlib.suppress(CallFailed):
            results[names[call]] = cluster.answer(call)
    return results


def kill_actors(cluster: Cluster, actors: Mapping[str, Actor], logs: Path) -> None:
    """Ends actors for good, with their processes."""
    for actor in actors.values():
        cluster.kill(actor)
    kill_processes(list(actors), logs)


def kill_processes(names: list[str], logs: Path) -> set[str]:
    """Kills workers' processes, also those that Ray cannot reach: a stopped process (SIGSTOP) handles no request.

    Returns the names of those that were found and killed.
    """
    infos = read_process_infos(names, logs)
    return {name for name, killed in run_on_nodes(kill_process, dict.fromkeys(infos, ()), infos).items() if killed}


def kill_process(info: ProcessInfo) -> bool:
    process = find_process(info)
    if process:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    unlink_shared_memory(info)
    return process is not None


def unlink_shared_memory(info: ProcessInfo) -> None:
    for file in info.shared_memory:
        if any(file.startswith(p) and "/" not in file.removeprefix(p) for p in SHARED_MEMORY_PREFIXES):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another user's by now
                Path(file).unlink()


def remove_shared_memory(names: Iterable[str], logs: Path) -> None:
    """Removes what ended workers left in /dev/shm, on this host and on others that answer."""
    infos = {name: info for name, info in read_process_infos(names, logs).items() if info.shared_memory}
    for info in infos.values():
        unlink_shared_memory(info)  # their names are random: those of other hosts do not exist here
    if is_connected():
        this_node = node_id()
        elsewhere = {name: info for name, info in infos.items() if info.node != this_node}
        run_on_nodes(unlink_shared_memory, dict.fromkeys(elsewhere, ()), elsewhere)


def clear_registry(logs: Path) -> None:
    """Removes what the workers of a killed driver left: shared memory on this host, then their files in `logs`."""
    files = list(logs.glob("*.pid"))
    remove_shared_memory((file.stem for file in files), logs)
    for file in files:
        file.unlink()
