"""What episodes cost: real runs of the tiny model, 1,024 samples a step, each way in turn.

    answers      single answers of 32 tokens
    one turn     episodes of one turn of 32 tokens
    turns        episodes of eight turns of 4 tokens
    slow         the same, and the environment sleeps 50 ms after each turn

python tests/bench/episodes.py                  # a run of each, about 4 minutes
python tests/bench/episodes.py --rounds 3
python tests/bench/episodes.py --own 64 --groups 8      # turns of 64 tokens, 128 samples a step
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from rlsys.runs.directory import read_lines

ROOT = Path(__file__).parent.parent.parent
STEPS = 5  # the first is left out
GAME = """
import asyncio

def length(completion):
    return float(len(completion))

async def one_turn(row, ask):
    return float(len((await ask(row["prompt"])).text))

async def turns(row, ask, pause_s=0):
    reply = await ask(row["prompt"])
    for i in range(7):
        if pause_s:
            await asyncio.sleep(pause_s)
        reply = await ask(f"{i}>")
    return float(len(reply.text))
"""
COMMON = "trainer.samples_per_prompt=16 eval.every=0 checkpoint.every=0 reference.kl_coef=0"
COMMON += f" policy.ranks=1 rollout.engines=1 rollout.max_sequences=512 reward.workers=1 trainer.steps={STEPS}"
TURNS = 8


def ways(folder: Path, own: int) -> dict[str, list[str]]:
    """`own`: tokens that the model writes in a turn."""
    (folder / "game.py").write_text(GAME)
    long, short = ([f"rollout.max_new_tokens={n}", f"rollout.min_new_tokens={n}"] for n in (TURNS * own, own))
    window = 64 + TURNS * (own + 4)

    def episodes(function: str, more: str = "") -> list[str]:
        return [
            f"episode={{play: '{folder}/game.py:{function}', window: {window}, workers: 1{more}}}",
            "reward.functions={}",
        ]

    return {
        "answers": [f"reward.functions={{'{folder}/game.py:length': 1}}", *long],
        "one turn": [*episodes("one_turn", ", concurrency: 1024"), *long],
        "turns": [*episodes("turns", ", concurrency: 1024"), *short],
        "slow": [*episodes("turns", ", concurrency: 1024, options: {pause_s: 0.05}"), *short],
    }


class Cost(NamedTuple):
    """Medians over steps."""

    step_s: float
    rollout_s: float
    driver_s: float  # CPU seconds
    engine_s: float


def measure(folder: Path, overrides: list[str]) -> Cost:
    run = folder / "run"
    command = [sys.executable, "-m", "launch", "train", "configs/tiny_cpu.yaml", f"run.dir={run}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *COMMON.split(), *overrides], cwd=ROOT, stdout=log, stderr=log)
        marks: list[tuple[float, float]] = []  # CPU seconds of driver and engine after each step
        while process.poll() is None:
            if len(read_lines(run / "metrics.jsonl")) - 1 > len(marks):
                with contextlib.suppress(psutil.Error, StopIteration):  # the last step is done, and they end
                    marks.append((cpu_s(driver_of(process.pid)), cpu_s(worker_of(run, "rollout-0"))))
            time.sleep(0.01)
    if process.returncode:
        raise SystemExit((folder / "log").read_text()[-2000:])
    lines = read_lines(run / "metrics.jsonl")[2:]
    spent = [[b - a for a, b in zip(before, after, strict=True)] for before, after in itertools.pairwise(marks)]
    step, rollout = (statistics.median(float(line[name]) for line in lines) for name in ("time/step", "time/rollout"))
    return Cost(step, rollout, *(statistics.median(column) for column in zip(*spent, strict=True)))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def driver_of(pid: int) -> psutil.Process:
    return next(p for p in psutil.Process(pid).children() if "launch" in " ".join(p.cmdline()))


def worker_of(run: Path, name: str) -> psutil.Process:
    return psutil.Process(json.loads((run / "logs" / f"{name}.pid").read_text())["pid"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--own", type=int, default=4, help="tokens that the model writes in a turn")
    parser.add_argument("--groups", type=int, default=64, help="of 16 samples, in a step")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    costs: dict[str, list[Cost]] = {}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as place:
            for name, overrides in ways(Path(place), given.own).items():
                folder = Path(place) / name.replace(" ", "_")
                folder.mkdir()
                costs.setdefault(name, []).append(
                    cost := measure(folder, [*overrides, f"trainer.prompts_per_step={given.groups}"])
                )
                print(
                    f"{name:8}  step {cost.step_s:6.2f} s  rollout {cost.rollout_s:6.2f} s  "
                    f"driver {cost.driver_s:5.2f} s of CPU  engine {cost.engine_s:5.2f} s",
                    flush=True,
                )
    show("step, one turn over answers", costs, lambda c: c["one turn"].step_s / c["answers"].step_s)
    show("driver, turns over answers", costs, lambda c: c["turns"].driver_s / c["answers"].driver_s)
    show("idle share of the engine, slow", costs, lambda c: 1 - c["turns"].rollout_s / c["slow"].rollout_s)


def show(name: str, costs: dict[str, list[Cost]], ratio: Callable[[dict[str, Cost]], float]) -> None:
    ratios = [ratio(dict(zip(costs, of_round, strict=True))) for of_round in zip(*costs.values(), strict=True)]
    print(f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
