"""Many runs in which processes chosen at random are killed at random moments; each must end as the one that was left alone.

    .venv/bin/python tests/system/kills.py RUNS SEED FILE.json       about a minute a run

Good runs that the file has of the same code are kept (tests/launch/records.py), so that the work can be interrupted.

Any process of a run may be taken: workers, processes of reward functions and episodes, engine cores, Ray's own, the driver, the command itself, or
all of them at once. Only after the last two is the command given again; from everything else the run must recover by itself.
"""

import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from killing import EPISODES, STEPS, Run, apart, require_equal
from records import current, measuring

AGENT = Path(__file__).parent / "own_agent.py"
LAST = 10  # step
OPTIONS = [*STEPS, "run.max_restarts=100"]
AHEAD = ["pipeline.max_lag=1", "dynamic_sampling.enabled=true", "reference.kl_coef=0"]
KINDS = {
    "lag 0, ZeRO 1": ["policy.zero_stage=1"],
    "lag 0, ZeRO 2": ["policy.zero_stage=2"],
    "lag 1, ZeRO 3, dynamic sampling": ["policy.zero_stage=3", *AHEAD],
    "episodes": EPISODES,
    "programs": [*EPISODES, f"episode.play={AGENT}:play", "episode.max_turns=8", "episode.step_timeout_s=10"],
}
KILLS = 4  # at most, in one run
LIMIT_S = 900
RECORD = "kills.json"


@dataclass(frozen=True)
class Pace:
    """Seconds that the run took that was left alone: kills are spread over as many."""

    start: float
    step: float


def main(runs: int, seed: int, target: Path, folder: Path) -> bool:
    """Returns whether all is good."""
    earlier = json.loads(target.read_text()) if target.exists() else []
    results = {one["run"]: one for one in earlier if one["run"] < runs}
    kept = {one["run"] for one in current(earlier, RECORD) if is_good(one) and one["seed"] == seed + one["run"]}
    paces: dict[Path, Pace] = {}
    for number in sorted({*range(runs)} - kept):
        kind = list(KINDS)[number % len(KINDS)]
        with measuring(RECORD) as commit:
            alone = folder / f"alone-{number % len(KINDS)}-{commit[-7:]}"  # of the same code
            if alone not in paces:
                paces[alone] = undisturbed(alone, kind)
            with apart() as place:
                run = Run(folder / f"{number}", *OPTIONS, *KINDS[kind], environment=place.environment)
                outcome = disturbed(run, paces[alone], seed + number) | {"left": place.left()}
        outcome["equal"] = equal(alone, folder / f"{number}")
        results[number] = {"run": number, "seed": seed + number, "commit": commit, "kind": kind} | outcome
        print(json.dumps(results[number]), flush=True)
        target.write_text(json.dumps([results[number] for number in sorted(results)], indent=2) + "\n")
    return all(map(is_good, results.values()))


def is_good(result: dict[str, Any]) -> bool:
    return result["equal"] == "yes" and not (result["gave_up"] or result["left"])


def undisturbed(path: Path, kind: str) -> Pace:
    began = time.monotonic()
    run = Run(path, *OPTIONS, *KINDS[kind]).start()
    assert run.wait() == 0, run.text()
    stepping = sum(line.get("time/step", 0.0) for line in run.lines())
    return Pace(time.monotonic() - began - stepping, stepping / LAST)


def disturbed(run: Run, pace: Pace, seed: int) -> dict[str, Any]:
    """Lets a run reach its end, with kills on the way: some a while after the one before, some in a step."""
    rng = random.Random(seed)
    killed: list[tuple[int, str]] = []
    began = time.monotonic()
    run.start()
    for step in sorted(rng.randint(-1, LAST - 1) for _ in range(rng.randint(1, KILLS))):
        while run.process.poll() is None and now(run) < step:
            time.sleep(0.05)
        pause(run, rng.uniform(0, pace.start if step < 0 else pace.step))
        if run.process.poll() is not None:
            break
        killed.append(kill(run, rng))
        if killed[-1][1] in ("everything", "the command"):
            run.process.wait(60)
            run.start()
    gave_up = run.text()[-3000:] if run.process.wait(LIMIT_S) else ""
    return {"killed": killed, "seconds": round(time.monotonic() - began), "gave_up": gave_up}


def now(run: Run) -> int:
    """The last step that has its line; -1 before the first."""
    lines = run.lines()
    return int(lines[-1]["step"]) if lines else -1


def pause(run: Run, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and run.process.poll() is None:
        time.sleep(0.02)


def kill(run: Run, rng: random.Random) -> tuple[int, str]:
    """Returns the step that was being made, and who died in it."""
    step = now(run) + 1
    if rng.random() < 0.1:
        run.end()
        return step, "everything"
    command, *others = run.family()
    names = {process: name(process) for process in others}
    workers = [process for process, title in names.items() if title.startswith("ray::")]
    victim = rng.choice(workers if workers and rng.random() < 0.5 else [command, *others])
    with contextlib.suppress(psutil.Error):
        victim.kill()
    return step, names.get(victim, "the command")


def name(process: psutil.Process) -> str:
    """`ray::PolicyRank.update`, `raylet`, `workers.start.worker_forkserver`, `log_monitor.py`"""
    with contextlib.suppress(psutil.Error, IndexError):
        words = process.cmdline()
        modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
        scripts = [Path(word).name for word in words[1:] if word.endswith(".py")]
        return [*modules, *scripts, Path(words[0]).name][0]
    return "gone"


def equal(one: Path, other: Path) -> str:
    try:
        require_equal(one, other)
    except (AssertionError, OSError, ValueError) as error:
        return f"no: {error}"[:500]
    return "yes"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(not main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(place)))
