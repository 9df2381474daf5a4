"""What every worker process does first, and ports."""

import os
import socket
from contextlib import closing
from pathlib import Path

from rlsys.config.schema import Config
from rlsys.runs import timeline
from workers.supervision import process_registry, stacks


def setup_worker_process(name: str, logs: str) -> None:
    """Sends this process's output, libraries' chatter included, to its own file in the run directory."""
    try:
        file = os.open(Path(logs) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # on another host without the run directory: Ray's own logs keep the output
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    process_registry.register_process(name, Path(logs))
    stacks.enable_stack_dumps(name, Path(logs))
    timeline.open_timeline(name, Path(logs))


def cpu_threads(config: Config, sharing: int) -> int:
    """CPU threads of a rank or the reference. Beside GPUs cores have little else to do: there it has its part of them, which an
    optimizer in host memory needs, and a reference without a GPU."""
    if config.cluster.device == "cpu":
        return config.policy.threads
    return max(config.policy.threads, len(os.sched_getaffinity(0)) // sharing)


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
