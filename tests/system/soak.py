"""A long run of the tiny model, one of whose processes is killed every so many steps, chosen at random.

    .venv/bin/python tests/system/soak.py STEPS EVERY SEED FILE.json

It must finish, learn, keep its memory flat and leave nothing behind. What was found is written to the file.
"""

import contextlib
import json
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from killing import Apart, Run, apart
from records import stamp

WORKERS = ["rollout-0", "rollout-1", "reward-0", "reward-1", "reference", "policy-0", "policy-1"]
WARM_UP = 20  # steps of a process's life in which its memory may grow


@dataclass
class Record:
    kills: list[tuple[int, str]] = field(default_factory=list)  # step, worker
    memory: dict[str, dict[int, list[tuple[int, float]]]] = field(  # worker → process → (step, MiB)
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )


def soak(path: Path, place: Apart, *, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Runs it, and returns what was found."""
    rng, record = random.Random(seed), Record()
    run = Run(
        path,
        *[f"trainer.steps={steps}", f"run.max_restarts={steps}", f"checkpoint.every={max(every // 2, 1)}"],
        *["trainer.prompts_per_step=16", f"eval.every={max(steps // 4, 1)}", "policy.lr_schedule=constant"],
        environment=place.environment,
    ).start()
    began, due = time.monotonic(), every
    try:
        while run.process.poll() is None:
            step = newest(run)
            weigh(run, step, record)
            if due <= step < steps:
                due += every
                victim = rng.choice([*WORKERS, "driver"])
                time.sleep(rng.random())
                if kill(run, victim):
                    record.kills.append((step, victim))
            time.sleep(0.2)
    finally:
        if run.process.poll() is None:
            run.end()
    lines = [line for line in run.lines() if "eval/zigzag/accuracy" in line]
    return {
        "steps": steps,
        "exit": run.process.returncode,
        "seconds": round(time.monotonic() - began),
        "done": run.lines()[-1]["step"],
        "accuracy": {line["step"]: round(line["eval/zigzag/accuracy"], 3) for line in lines},
        "kills": len(record.kills),
        "killed": {name: sum(victim == name for _, victim in record.kills) for name in [*WORKERS, "driver"]},
        "replaced": len(run.events("replaced")),
        "restarts": len(run.events("restart")),
        "growth_mib_per_100_steps": {name: growth(own) for name, own in sorted(record.memory.items())},
        "growth_within_a_life": {name: growth_within(own) for name, own in sorted(record.memory.items())},
        "left": place.left(),
        "words": "" if run.process.returncode == 0 else run.text()[-2000:],
    }


def newest(run: Run) -> int:
    lines = run.lines()
    return int(lines[-1]["step"]) if lines else 0


def kill(run: Run, victim: str) -> bool:
    with contextlib.suppress(OSError, ValueError, AssertionError, psutil.Error, IndexError):
        process = run.family()[1] if victim == "driver" else run.process_of(victim)
        process.send_signal(signal.SIGKILL)
        return True
    return False  # it is being replaced already


def weigh(run: Run, step: int, record: Record) -> None:
    for name in [*WORKERS, "driver", "parent"]:
        with contextlib.suppress(OSError, ValueError, AssertionError, psutil.Error, IndexError):
            family = {"driver": 1, "parent": 0}
            process = run.family()[family[name]] if name in family else run.process_of(name)
            points = record.memory[name][process.pid]
            if not points or points[-1][0] != step:
                points.append((step, process.memory_info().rss / 2**20))


Points = list[tuple[int, float]]  # (step, MiB)


def settled(processes: dict[int, Points]) -> list[Points]:
    """Of each process, what it took after its first steps."""
    return [[p for p in points if p[0] >= points[0][0] + WARM_UP] for points in processes.values()]


def growth(processes: dict[int, Points]) -> float | None:
    """MiB per 100 steps over the whole run, whichever process had the name."""
    return slope([p for points in settled(processes) for p in points])


def growth_within(processes: dict[int, Points]) -> float | None:
    """The same within the lives of processes: one slope for all, each with a level of its own. Few live longer than 100 steps."""
    centred = []
    for points in settled(processes):
        if len(points) > 2:
            steps, sizes = np.mean(points, axis=0)
            centred += [(step - steps, size - sizes) for step, size in points]
    return slope(centred)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < 3:
        return None
    steps, sizes = np.array(points, dtype=float).T
    return round(float(np.polyfit(steps, sizes, 1)[0] * 100), 3)


if __name__ == "__main__":
    import tempfile

    steps, every, seed, target = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    commit = stamp()
    with tempfile.TemporaryDirectory() as folder, apart() as place:
        found = {"commit": commit} | soak(Path(folder) / "run", place, steps=steps, every=every, seed=seed)
    target.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    sys.exit(found["exit"] or bool(found["left"]))
