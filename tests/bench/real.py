"""Trains Gemma 3 270M on its six tasks with three seeds, with LoRA and with shuffled rewards, for the table of configs/README.md.

.venv/bin/python tests/bench/real.py             all five runs, 20 to 25 minutes each (`make seeds`); then prints the table
.venv/bin/python tests/bench/real.py LoRA        only this one
.venv/bin/python tests/bench/real.py --table     runs nothing

Writes tests/bench/real.json. Runs of the same code are kept (tests/launch/records.py), so that the work can be interrupted.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from rlsys.runs.directory import read_lines
from rlsys.runs.samples import read_saved_samples

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
from records import MISSING, current, measuring

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
RUNS = {
    "seed 0": ["run.seed=0"],
    "seed 1": ["run.seed=1"],
    "seed 2": ["run.seed=2"],
    "LoRA": ["run.seed=0", "policy.lora={rank: 16, alpha: 32}", "policy.lr=5e-5"],
    "shuffled rewards": ["run.seed=0", "reward.shuffle=true"],
}
TASKS = ["letter", "digits", "sort", "plural", "max", "add"]
Record = dict[str, dict[str, Any]]  # by name of the run


def measure(name: str) -> dict[str, Any]:
    with measuring(RECORD.name) as commit, tempfile.TemporaryDirectory(prefix="real-") as place:
        run, began = Path(place) / "run", time.monotonic()
        command = [sys.executable, "-m", "launch", "train", "configs/gemma3_270m_cpu.yaml", f"run.dir={run}"]
        if code := subprocess.run([*command, *RUNS[name]], cwd=ROOT).returncode:
            raise SystemExit(f"{name}: exit {code}. `make real` brings the model.")
        seconds = round(time.monotonic() - began)
        return {"commit": commit, "overrides": RUNS[name], "seconds": seconds, **results_of(run)}


def results_of(run: Path) -> dict[str, Any]:
    """Prompts, accuracy and its interval of each task at each evaluation, and answers that became right."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if f"eval/{TASKS[0]}/accuracy" in line]
    first, last = (
        {saved.prompt.text: saved for saved in read_saved_samples(run / "samples" / f"eval-{line['step']:06d}.parquet")}
        for line in (lines[0], lines[-1])
    )
    return {
        "tasks": {
            task: {
                "prompts": sum(saved.prompt.source == task for saved in first.values()),
                "accuracy": {str(line["step"]): bounds(line, task) for line in lines},
            }
            for task in TASKS
        },
        "became_right": [
            [prompt.splitlines()[-1], saved.sample.text.strip(), last[prompt].sample.text.strip()]
            for prompt, saved in first.items()
            if (saved.verdict.score, last[prompt].verdict.score) == (0, 1)
        ][:6],
    }


def bounds(line: dict[str, float], task: str) -> list[float]:
    """Accuracy, and its 95 % interval over prompts."""
    name = f"eval/{task}/accuracy"
    return [round(line[key], 4) for key in (name, f"{name}/low", f"{name}/high")]


# --- the page ---------------------------------------------------------------------------------------------------------


def table(record: Record) -> str:
    """A row per task: before, and after each run; then the commits."""
    head = ["task", "prompts", "before", *record]
    rows = [head, ["---"] * len(head)]
    runs = [run["tasks"] for run in record.values()]
    for task in TASKS:
        before, *ends = runs[0][task]["accuracy"]["0"], *([*run[task]["accuracy"].values()][-1] for run in runs)
        rows.append([task, str(runs[0][task]["prompts"]), *map(percent, (before, *ends))])
    rows.append(
        ["mean of tasks", "", f"{mean(record, 0, 0):.0f}", *(f"{mean(record, i, -1):.0f}" for i in range(len(runs)))]
    )
    rows.append(["minutes", "", "", *(f"{run['seconds'] / 60:.0f}" for run in record.values())])
    rows.append(["commit", "", "", *(f"`{run['commit']}`" for run in record.values())])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def percent(value: list[float]) -> str:
    """[0.57, 0.41, 0.7] -> 57 (41–70)"""
    middle, low, high = (f"{100 * v:.0f}" for v in value)
    return middle if low == high else f"{middle} ({low}–{high})"


def mean(record: Record, run: int, evaluation: int) -> float:
    """Accuracy over the tasks, each counted once, in percent."""
    tasks = [*record.values()][run]["tasks"].values()
    return 100 * fmean([*task["accuracy"].values()][evaluation][0] for task in tasks)


def read_record() -> Record:
    """The runs that it has."""
    runs = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: run for name, run in runs.items() if run != MISSING}


if __name__ == "__main__":
    results = read_record()
    for name in [] if "--table" in sys.argv else sys.argv[1:] or RUNS:
        if not current([results.get(name, {})], RECORD.name):
            results[name] = measure(name)
            results = {run: results[run] for run in RUNS if run in results}
            RECORD.write_text(json.dumps({run: results.get(run, MISSING) for run in RUNS}, indent=1) + "\n")
    if results:
        print(table(results))
