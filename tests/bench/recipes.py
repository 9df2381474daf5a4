"""Trains the tiny recipes for several seeds and draws the table of configs/README.md from what it measured.

.venv/bin/python tests/bench/recipes.py                     every recipe, seeds 0, 1 and 2: about 75 minutes
.venv/bin/python tests/bench/recipes.py dapo ppo --seeds 0  only these
.venv/bin/python tests/bench/recipes.py --table             runs nothing, prints the table

Results in recipes.jsonl are kept while the code that they depend on is the same (tests/launch/records.py), so that the work can
be interrupted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlsys.runs.directory import read_lines

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from records import current, measuring

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("recipes.jsonl")
RECIPES = ["tiny_cpu", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "degrpo", "ppo"]
KEY, BARS = "eval/zigzag/accuracy", "▁▂▃▄▅▆▇█"


def run(recipe: str, seed: int) -> dict[str, Any]:
    with measuring(RESULTS.name) as commit, tempfile.TemporaryDirectory(prefix="recipes-") as place:
        command = [sys.executable, "-m", "launch", "train", f"configs/{recipe}.yaml"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, f"run.seed={seed}", f"run.dir={place}/run"], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"{recipe}, seed {seed}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        lines = read_lines(Path(place) / "run" / "metrics.jsonl")
    accuracy = {str(found["step"]): round(found[KEY], 4) for found in lines if KEY in found}
    seconds = round(time.monotonic() - began)
    return {"recipe": recipe, "seed": seed, "commit": commit, "seconds": seconds, "accuracy": accuracy}


def save(results: list[dict[str, Any]]) -> None:
    """Writes the newest result of each recipe and seed, in the order of the table."""
    newest = {(r["recipe"], r["seed"]): r for r in results}
    ordered = sorted(newest.values(), key=lambda r: (RECIPES.index(r["recipe"]), r["seed"]))
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in ordered))


def table(results: list[dict[str, Any]]) -> str:
    """Returns one row per recipe with the curve of each seed, and their commits."""
    seeds = sorted({r["seed"] for r in results})
    rows = [line(["recipe", *(f"seed {seed}" for seed in seeds), "commit"]), "|---" * (2 + len(seeds)) + "|"]
    for recipe in RECIPES:
        own = [r for r in results if r["recipe"] == recipe]
        curves = {r["seed"]: f"`{curve(list(r['accuracy'].values()))}`" for r in own}
        if curves:
            commits = ", ".join(dict.fromkeys(f"`{r['commit']}`" for r in own))
            rows.append(line([f"`{recipe}.yaml`", *(curves.get(seed, "") for seed in seeds), commits]))
    return "\n".join(rows)


def line(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|"


def curve(values: list[float]) -> str:
    """[0, 0.5, 1] -> ▁▅█"""
    return "".join(BARS[min(int(v * len(BARS)), len(BARS) - 1)] for v in values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    wanted = parser.parse_args()
    results = read_lines(RESULTS)
    if not wanted.table:
        kept = {(r["recipe"], r["seed"]) for r in current(results, RESULTS.name)}
        missing = [(recipe, seed) for seed in wanted.seeds for recipe in wanted.recipes if (recipe, seed) not in kept]
        for number, (recipe, seed) in enumerate(missing, 1):
            results.append(run(recipe, seed))
            print(f"{number} of {len(missing)}: {json.dumps(results[-1])}", flush=True)
            save(results)
    print(table(read_lines(RESULTS)))
