"""How the memory of every process of a run grows with the steps.

At first it does: libraries allocate what they keep, and malloc keeps memory that was freed. Both end within `SETTLE` steps
of a process. Growth after them means that something is kept for each step.
"""

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from command_lines import command_of
from killing import Run

SETTLE = 200  # first steps of a process, in which its memory may grow
SPAN = 500  # steps after these; a process with fewer is not judged
LIMIT = 1.0  # MiB in 100 steps
EVERY = 5  # steps between two measurements


@dataclass
class Life:
    """A process while it lived: its role, and the memory it had. `Life("policy-0", [(0, 431.2, 345.1), …])`"""

    role: str
    points: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # step, MiB, MiB that no file or process shares

    @property
    def steps(self) -> int:
        return self.points[-1][0] - self.points[0][0]

    def growth(self) -> dict[str, Any]:
        """MiB in 100 steps by least squares, after the first steps."""
        steps, total, private = np.array([p for p in self.points if p[0] >= self.points[0][0] + SETTLE]).T
        return {
            "role": self.role,
            "steps": [int(steps[0]), int(steps[-1])],
            "mib": [round(total[0], 1), round(total[-1], 1)],
            "growth": slope(steps, total),
            "private_growth": slope(steps, private),
        }


def slope(steps: Any, sizes: Any) -> float:
    return round(float(np.polyfit(steps, sizes, 1)[0]) * 100, 3)


class ProcessMemory:
    """Follows the processes of a run, those of Ray included. `memory.measure(run, step)`, again and again."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, float], Life] = {}  # by process and when it was created
        self.step = -EVERY

    def measure(self, run: Run, step: int) -> None:
        if abs(step - self.step) < EVERY:
            return
        self.step, workers = step, worker_names(run)
        with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended
            for process in run.family():
                with contextlib.suppress(psutil.Error, IndexError):  # this one has ended
                    info, key = process.memory_info(), (process.pid, process.create_time())
                    life = self.lives.setdefault(key, Life(""))
                    life.role = role_of(process, workers)  # it may not have had its name before
                    life.points.append((step, info.rss / 2**20, (info.rss - info.shared) / 2**20))

    def report(self) -> dict[str, Any]:
        """The growth of processes that lived long enough, and how long the others lived."""
        judged = [life for life in self.lives.values() if life.steps >= SETTLE + SPAN]
        rows = sorted((life.growth() for life in judged), key=lambda row: -row["growth"])
        shorter: dict[str, list[int]] = defaultdict(list)
        for life in self.lives.values():
            if life.steps < SETTLE + SPAN:
                shorter[life.role].append(life.steps)
        return {
            "growth_mib_per_100_steps": rows,
            "growing": [row["role"] for row in rows if row["growth"] > LIMIT],
            f"shorter_than_{SETTLE + SPAN}_steps": {
                role: {"processes": len(steps), "longest": max(steps)} for role, steps in sorted(shorter.items())
            },
        }


def worker_names(run: Run) -> dict[int, str]:
    """The names of workers by process."""
    names = {run.process.pid: "command"}
    for file in (run.path / "logs").glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            names[int(json.loads(file.read_text())["pid"])] = file.stem
    return names


def role_of(process: psutil.Process, workers: dict[int, str]) -> str:
    """policy-0, driver, raylet, worker_forkserver; of a process that a worker has started: reward-0: workers.reward.process"""
    if name := workers.get(process.pid):
        return name
    parent = workers.get(process.ppid(), "")
    if parent == "command":
        return "driver"
    return f"{parent}: {program(process)}" if parent else program(process)


def program(process: psutil.Process) -> str:
    """The name of a process; of Python's the module or script that it runs."""
    if not process.name().startswith("python"):
        return process.name()
    words = command_of(process)
    if "-m" in words:
        return words[words.index("-m") + 1]
    if "-c" in words:
        return words[words.index("-c") + 1].split()[1]  # from multiprocessing.resource_tracker import main
    return Path(next((word for word in words[1:] if not word.startswith("-")), process.name())).stem  # none: it ends
