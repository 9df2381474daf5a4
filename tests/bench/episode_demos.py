"""Trains the demos with episodes: three seeds of each, one with shuffled rewards, the game without a score per guess, and the
calculator as programs play it that ask a web address.

.venv/bin/python tests/bench/episode_demos.py [guess_cpu] [calculator_cpu]      about 35 minutes (nothing else should run)

Writes tests/bench/episode_demos.json: the share of held-out episodes solved, calls per episode, times, and some
episodes before and after training. Runs of the same code are kept (tests/launch/records.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rlsys.runs.directory import read_lines
from rlsys.runs.samples import read_saved_samples

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from cpu_seconds import CpuSeconds
from records import current, measuring

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
DEMOS = ["guess_cpu", "calculator_cpu"]
SEEDS = (0, 1, 2)
OUTCOME_ALONE = ["data.train={builtin:guess: {episode: guess}}", "algorithm.credit=episode"]  # a game is won or lost
RUNS = {demo: [*((seed, []) for seed in SEEDS), (0, ["reward.shuffle=true"])] for demo in DEMOS}
AGENTS = "episode.play=rlsys.tasks.calculator_agents:with_"  # loops around clients of OpenAI and Anthropic
RUNS["calculator_cpu"] += [(seed, [f"{AGENTS}{client}"]) for client in ("openai", "anthropic") for seed in SEEDS]
RUNS["guess_cpu"] += [(seed, OUTCOME_ALONE) for seed in SEEDS]


def measure(demo: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    with measuring(RECORD.name) as commit, tempfile.TemporaryDirectory(prefix="demos-") as place:
        run, began = Path(place) / "run", time.monotonic()
        command = [sys.executable, "-m", "launch", "train", f"configs/{demo}.yaml", f"run.seed={seed}"]
        process = psutil.Popen(
            [*command, f"run.dir={run}", *overrides],
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": place},  # no warm-started model there
            stdout=subprocess.DEVNULL,
        )
        spent = CpuSeconds(process.pid)
        if process.wait():
            raise SystemExit(f"{demo}, seed {seed}: exit {process.returncode}")
        seconds = {"seconds": round(time.monotonic() - began), "cpu_seconds": round(spent.total())}
        name = demo.removesuffix("_cpu")
        lines = [line for line in read_lines(run / "metrics.jsonl") if f"eval/{name}/accuracy" in line]
        return {
            **{"demo": demo, "seed": seed, "overrides": overrides, "commit": commit, **seconds},
            "solved": {str(line["step"]): round(line[f"eval/{name}/accuracy"], 3) for line in lines},
            "episodes": {
                str(line["step"]): episodes(run / "samples" / f"eval-{line['step']:06d}.parquet")
                for line in (lines[0], lines[-1])
            },
        }


def episodes(file: Path) -> dict[str, Any]:
    """The share of episodes with a call, and the first three episodes of an evaluation."""
    saved = list(read_saved_samples(file))
    transcripts = [s.sample.episode.messages for s in saved if s.sample.episode]
    calling = [any(message.get("tool_calls") for message in messages) for messages in transcripts]
    return {
        "calling": round(sum(calling) / len(calling), 3),
        "first": [shown(messages) for messages in transcripts[:3]],
    }


def shown(messages: list[dict[str, Any]]) -> str:
    """ "12 26 → 19, lower → 15, higher → 17" or "27+58 → add(27, 58), 85 → =85" """
    words = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = [f"{call['name']}({', '.join(map(str, call['arguments'].values()))})" for call in calls]
        words.append(message["content"] + "".join(called))
    return ", ".join(" → ".join(words[i : i + 2]) for i in range(0, len(words), 2))


def key(result: dict[str, Any]) -> tuple[Any, ...]:
    return (result["demo"], result["seed"], *result["overrides"])


if __name__ == "__main__":
    results = {key(r): r for r in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    kept = {key(r) for r in current([*results.values()], RECORD.name)}
    for demo in sys.argv[1:] or DEMOS:
        for seed, overrides in RUNS[demo]:
            if (demo, seed, *overrides) not in kept:
                result = measure(demo, seed, overrides)
                results[key(result)] = result
                RECORD.write_text(json.dumps([*results.values()], indent=1, ensure_ascii=False) + "\n")
                print(json.dumps(result, ensure_ascii=False), flush=True)
