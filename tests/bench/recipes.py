"""Trains the tiny recipes for several seeds and draws the table of configs/README.md from what it measured.

.venv/bin/python tests/bench/recipes.py                     every recipe, seeds 0, 1 and 2; what recipes.jsonl has is not run again
.venv/bin/python tests/bench/recipes.py dapo ppo --seeds 0  only these
.venv/bin/python tests/bench/recipes.py --table             runs nothing, prints the table
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

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("recipes.jsonl")
RECIPES = ["tiny_cpu", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "degrpo", "ppo"]
KEY, BARS = "eval/zigzag/accuracy", "▁▂▃▄▅▆▇█"


def run(recipe: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="recipes-") as place:
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
    return {"recipe": recipe, "seed": seed, "seconds": round(time.monotonic() - began), "accuracy": accuracy}


def table(results: list[dict[str, Any]]) -> str:
    """Returns one row per recipe with the curve of each seed."""
    seeds = sorted({r["seed"] for r in results})
    rows = [line(["recipe", *(f"seed {seed}" for seed in seeds)]), "|---" * (1 + len(seeds)) + "|"]
    for recipe in RECIPES:
        curves = {r["seed"]: f"`{curve(list(r['accuracy'].values()))}`" for r in results if r["recipe"] == recipe}
        if curves:
            rows.append(line([f"`{recipe}.yaml`", *(curves.get(seed, "") for seed in seeds)]))
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
    there = {(r["recipe"], r["seed"]) for r in results}
    for seed in wanted.seeds if not wanted.table else []:
        for recipe in wanted.recipes:
            if (recipe, seed) not in there:
                results.append(run(recipe, seed))
                print(json.dumps(results[-1]), flush=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    print(table(results))
