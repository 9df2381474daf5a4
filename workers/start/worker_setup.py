"""What every worker process does first."""

import os
from pathlib import Path

from rlsys.config.schema import Config
from rlsys.rewards.asking import LOGS
from rlsys.runs.timeline import open_timeline
from workers.fleet.process_registry import register_process
from workers.fleet.stacks import enable_stack_dumps


def setup_worker_process(name: str, logs: str) -> None:
    """Sends the process's output, that of libraries included, to its own log, and makes the process inspectable."""
    try:
        file = os.open(Path(logs) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # on another host without the run directory: Ray's own logs keep the output
        return
    os.environ[LOGS] = logs
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    register_process(name, Path(logs))
    enable_stack_dumps(name, Path(logs))
    open_timeline(name, Path(logs))


def cpu_threads(config: Config, processes: int) -> int:
    """Returns the CPU threads of a learner process, one of `processes` that share the cores of their nodes.

    On a node with GPUs, the cores are mostly idle. An optimizer in host memory needs them, and a reference without a GPU.
    """
    if config.cluster.device == "cpu":
        return config.policy.threads
    on_node = min(processes, len(list(Path("/dev").glob("nvidia[0-9]*"))) or processes)
    return max(config.policy.threads, len(os.sched_getaffinity(0)) // on_node)
