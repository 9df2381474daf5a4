"""Disturbs a process in a phase of a step that one chooses. The run's own timeline says when the phase has begun.

The driver's timeline has a line for each phase when it ends. So a phase lasts from the end of the one before to its own.
"""

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from typing import Any

import psutil
from command_lines import command_of
from killing import Run


@dataclass(frozen=True)
class Phase:
    """It lasts from the end of the driver's span `after` to the end of its span `until`.

    With `worker`, it begins with the end of the first span `span` of that worker later on.
    """

    after: str
    until: str
    worker: str = ""
    span: str = ""


PHASES = {
    "rollout": Phase("step", "collect"),
    "reward": Phase("step", "collect", "reward-0", "judge"),
    "score": Phase("collect", "score"),  # with dynamic sampling; without it, samples are scored during the rollout
    "update": Phase("score", "update"),  # advantages included
    "sync": Phase("update", "sync"),
    "evaluation": Phase("sync", "evaluation"),  # this one and the next two: if they are due in each step
    "checkpoint": Phase("evaluation", "checkpoint"),
    "writing of the checkpoint": Phase("evaluation", "checkpoint", "policy-0", "save"),
}
DRIVER, REWARD_PROCESS, EPISODE_PROCESS = "driver", "reward process", "episode process"
MODULES = {REWARD_PROCESS: "workers.reward.process", EPISODE_PROCESS: "workers.episodes.process"}


def aim(run: Run, phase: str, victim: str, number: int = signal.SIGKILL, share: float = 0.0) -> bool:
    """Sends a signal to a process in the phase that begins next, after a share of the time that it took before.

    Returns whether the phase still lasted then.
    """
    begun = wait_for_begin(run, PHASES[phase])
    time.sleep(share * last_duration(run, PHASES[phase]))
    run.until(lambda: find(run, victim)).send_signal(number)
    sent = time.time()
    time.sleep(0.2)  # the line of a phase is written after its end
    return not any(begun < end <= sent for end in ends(run, PHASES[phase].until))


def wait_for_begin(run: Run, phase: Phase) -> float:
    """Waits until the phase begins once more. Returns the time."""
    before = len(ends(run, phase.after))
    begun: float = run.until(lambda: ends(run, phase.after)[before:], every_s=0.002)[0]
    if phase.worker:
        own = run.until(lambda: [t for t in ends_of(run, phase.worker, phase.span) if t > begun], every_s=0.002)
        begun = own[0]
    return begun


def ends(run: Run, name: str) -> list[float]:
    """When the driver ended its spans of this name; `checkpoint`: when one was complete."""
    if name == "checkpoint":
        return [e["time"] for e in run.events("checkpoint")]
    return ends_of(run, DRIVER, name)


def ends_of(run: Run, worker: str, name: str) -> list[float]:
    return [span["at"] + span["s"] for span in spans(run, worker) if span["span"] == name]


def last_duration(run: Run, phase: Phase) -> float:
    """Seconds that the phase took last; 0 where only its rest is aimed at."""
    own = [span["s"] for span in spans(run, DRIVER) if span["span"] == phase.until]
    return float(own[-1]) if own and not phase.worker else 0.0


def spans(run: Run, worker: str) -> list[dict[str, Any]]:
    file, recorded = run.path / "logs" / f"{worker}.spans", []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # an empty line, or half of one
            recorded.append(json.loads(line))
    return recorded


def find(run: Run, victim: str) -> psutil.Process:
    if victim == DRIVER:
        return run.family()[1]
    if victim in MODULES:
        return next(p for p in run.family() if MODULES[victim] in command_of(p))
    return run.process_of(victim)
