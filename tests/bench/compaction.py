"""Trains games whose conversations begin anew, three seeds of each: with a summary by the harness, and with notes by the model.

.venv/bin/python tests/bench/compaction.py      about 25 minutes (nothing else should run)

`whole` and `compacted`: the game `guess`, with its whole history, and with the range that is left after every two turns.
`notes trained` and `notes masked`: a game of memory in which the model sees its own last note alone, and is asked at the end. Its
notes are trained as all turns are, or have no loss. Writes tests/bench/compaction.json. Runs of the same code are kept.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlsys.runs.directory import read_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).with_suffix("")))
from games import rows
from records import current, measuring

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
GAMES = "tests/bench/compaction/games.py"
SEEDS = (0, 1, 2)
GUESS, LARGEST = "configs/guess_cpu.yaml", "tests/bench/compaction/largest.yaml"
SCORED = f"data.train={{builtin:guess: {{episode: '{GAMES}:guess_compacted_scored'}}}}"
CHOICES: dict[str, tuple[str, list[str]]] = {
    "whole": (GUESS, []),
    "compacted": (GUESS, [f"episode.play={GAMES}:guess_compacted", SCORED]),
    "notes trained": (LARGEST, []),
    "notes masked": (LARGEST, [f"algorithm.loss={GAMES}:answers_alone"]),
}


def measure(choice: str, seed: int) -> dict[str, Any]:
    config, overrides = CHOICES[choice]
    with measuring(RECORD.name) as commit, tempfile.TemporaryDirectory(prefix="compaction-") as place:
        if config == LARGEST:
            overrides = [*overrides, *write_data(Path(place))]
        run, began = Path(place) / "run", time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "launch", "train", config, f"run.seed={seed}", f"run.dir={run}", *overrides],
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": place},  # no warm-started model there
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = list(read_lines(run / "metrics.jsonl"))
        [score] = {name for line in lines for name in line if name.startswith("eval/") and name.endswith("/accuracy")}
        return {
            **{"choice": choice, "seed": seed, "commit": commit, "seconds": round(time.monotonic() - began)},
            "held out": {str(line["step"]): round(line[score], 3) for line in lines if score in line},
        }


def write_data(place: Path) -> list[str]:
    for name, count in (("train", 4096), ("held_out", 256)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name, count)))
    return [f"data.train={place}/train.jsonl", f"eval.datasets=[{place}/held_out.jsonl]"]


def key(result: dict[str, Any]) -> tuple[str, int]:
    return result["choice"], result["seed"]


if __name__ == "__main__":
    results = {key(r): r for r in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    kept = {key(r) for r in current([*results.values()], RECORD.name)}
    for wanted in [(choice, seed) for choice in CHOICES for seed in SEEDS]:
        if wanted not in kept:
            results[wanted] = measure(*wanted)
            RECORD.write_text(json.dumps([*results.values()], indent=1) + "\n")
            print(json.dumps(results[wanted]), flush=True)
