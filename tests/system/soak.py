"""A long run of the tiny model, one of whose processes is killed every so many steps, chosen at random.

    .venv/bin/python tests/system/soak.py STEPS EVERY SEED FILE.json [episodes] [KEY=VALUE]...       EVERY 0: none is killed

Kills end halfway. The run must finish, learn and leave nothing behind, and no process that lives long enough may grow: see
process_memory.py. What was found is written to the file, named for its entry in tests/launch/records.py; a good record of the
same code is kept.
"""

import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from killing import EPISODES, ROOT, Apart, Run, apart
from process_memory import ProcessMemory
from records import current, measuring

from rlsys.runs.directory import read_lines

WORKERS = ["rollout-0", "rollout-1", "reward-0", "reward-1", "reference", "policy-0", "policy-1"]
PLAYERS = ["episode-0", "episode-1"]
NEWEST = 1 << 16  # bytes of metrics.jsonl in which the newest step is


def soak(path: Path, place: Apart, *overrides: str, steps: int, every: int, until: int, seed: int) -> dict[str, Any]:
    """Runs it, with kills `every` so many steps until a step, and returns what was found."""
    rng, memory = random.Random(seed), ProcessMemory()
    kills: list[str] = []
    victims = [*WORKERS, *(PLAYERS if any(o.startswith("episode") for o in overrides) else ()), "driver"]
    run = Run(path, *options(steps, every), *overrides, environment=place.environment).start()
    began, due, told = time.monotonic(), every or steps, 0
    try:
        while run.process.poll() is None:
            step = newest_step(run)
            memory.measure(run, step)
            if step >= told + 100:
                told = step
                print(f"step {step} of {steps}, {len(kills)} kills, {time.monotonic() - began:.0f} s", flush=True)
            if due <= step < until:
                due += every
                victim = rng.choice(victims)
                time.sleep(rng.random())
                if kill(run, victim):
                    kills.append(victim)
            time.sleep(0.2)
    finally:
        if run.process.poll() is None:
            run.end()
    lines = [line for line in run.lines() if "eval/zigzag/accuracy" in line]
    return {
        "steps": steps,
        "overrides": [o.replace(f"{ROOT}/", "") for o in overrides],
        "exit": run.process.returncode,
        "seconds": round(time.monotonic() - began),
        "done": run.lines()[-1]["step"],
        "accuracy": {line["step"]: round(line["eval/zigzag/accuracy"], 3) for line in lines},
        "kills": len(kills),
        "killed": {name: kills.count(name) for name in victims},
        "replaced": len(run.events("replaced")),
        "restarts": len(run.events("restart")),
        **memory.report(),
        "left": place.left(),
        "words": "" if run.process.returncode == 0 else run.text()[-2000:],
    }


def options(steps: int, every: int) -> list[str]:
    return [
        *[f"trainer.steps={steps}", f"run.max_restarts={steps}", f"checkpoint.every={every // 2 or 10}"],
        *["trainer.prompts_per_step=16", f"eval.every={max(steps // 20, 20)}", "policy.lr_schedule=constant"],
    ]


def newest_step(run: Run) -> int:
    lines = read_lines(run.path / "metrics.jsonl", NEWEST)
    return int(lines[-1]["step"]) if lines else 0


def kill(run: Run, victim: str) -> bool:
    with contextlib.suppress(OSError, ValueError, AssertionError, psutil.Error, IndexError):
        process = run.family()[1] if victim == "driver" else run.process_of(victim)
        process.send_signal(signal.SIGKILL)
        return True
    return False  # it is being replaced already


def is_good(record: dict[str, Any]) -> bool:
    return not (record["exit"] or record["left"] or record["growing"])


if __name__ == "__main__":
    import tempfile

    steps, every, seed, target = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    earlier = [json.loads(target.read_text())] if target.exists() else []
    if any(map(is_good, current(earlier, target.name))):
        print(f"{target} is of this code, and kept. To make it again, remove it.")
        sys.exit()
    with tempfile.TemporaryDirectory() as folder, measuring(target.name) as commit, apart() as place:
        run = Path(folder) / "run"
        overrides = [o for word in sys.argv[5:] for o in (EPISODES if word == "episodes" else [word])]
        record = soak(run, place, *overrides, steps=steps, every=every, until=steps // 2, seed=seed)
    record = {"commit": commit} | record
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    sys.exit(not is_good(record))
