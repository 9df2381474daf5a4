"""How well `rlsys plan --simulate` foretells real runs, and what running ahead gains: one engine on one core, one rank on another.

    python tests/bench/simulate.py                   # 8 M parameters, about ten minutes
    python tests/bench/simulate.py --rounds 3

Costs are fitted to the runs with `pipeline.max_lag: 0` alone, those of the same round; every other way of running is then simulated
with them and run for real, on the same prompts and lengths. `own` is what comes of the costs of the very run that is foretold.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_models import CASES, PROMPT, save_case

from launch.tools.plan import costs
from launch.tools.plan.simulate import SimulatedLoop
from launch.tools.synthetic import CompletionLengths
from rlsys.checks import load_checked
from rlsys.config.schema import DataConfig

HERE = Path(__file__).parent
CONFIG = HERE / "trl" / "rlsys.yaml"
MEAN, LONGEST = 64, 240
ALONE = [
    "rollout.engines=1",
    "rollout.threads=1",
    "policy.ranks=1",
    "policy.threads=1",
    f"rollout.max_prompt_tokens={PROMPT}",
    f"rollout.max_new_tokens={LONGEST}",
]
WAYS = {
    "max_lag 0": ["pipeline.max_lag=0"],
    "max_lag 1": ["pipeline.max_lag=1"],
    "max_lag 2": ["pipeline.max_lag=2"],
    "in flight, max_lag 1": ["pipeline.max_lag=1", "pipeline.in_flight=true"],
    "max_lag 0, 32 at once": ["pipeline.max_lag=0", "rollout.max_sequences=32"],
    "oversample 0.25, max_lag 2": ["pipeline.max_lag=2", "pipeline.in_flight=true", "rollout.oversample=0.25"],
}


def run(settings: list[str], folder: Path, steps: int) -> dict[str, Any]:
    """What `rlsys bench` says."""
    out = folder / "figures.json"
    rlsys = Path(sys.executable).with_name("rlsys")
    command = [str(rlsys), "bench", str(CONFIG), *settings, "--steps", str(steps)]
    command += ["--warmup", "4", "--prompt-tokens", str(PROMPT), "--ragged", f"{MEAN},{LONGEST}", "--json", str(out)]
    cores = sorted(os.sched_getaffinity(0))[:2]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if ended.returncode:
        raise SystemExit(f"{command} ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return dict(json.loads(out.read_text()))


def simulated(settings: list[str], figures: Path, steps: int) -> float:
    """Seconds of a step."""
    config = load_checked(CONFIG, settings)
    config = replace(config, data=DataConfig(), rollout=replace(config.rollout, max_new_tokens=LONGEST))
    lengths = CompletionLengths(MEAN, LONGEST, config.run.seed)
    return SimulatedLoop(config, costs.read_costs(figures, PROMPT), lengths, PROMPT).run(steps).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="that count, of each run")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    own: dict[str, list[float]] = {way: [] for way in WAYS}
    gains: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_case(CASES["8m"], folder / "model")
        common = [*ALONE, f"model.path={folder / 'model'}", f"data.train={folder / 'model' / 'prompts.jsonl'}"]
        for _ in range(options.rounds):
            for way, settings in WAYS.items():
                figures = run([*common, *settings], folder, options.steps)
                real = statistics.fmean(figures["step_s"])
                if way == "max_lag 0":
                    base, fitted = real, folder / "costs.json"
                    fitted.write_text(json.dumps(figures))
                predicted = simulated([*common, *settings], fitted, options.steps)
                ratios[way].append(predicted / real)
                own[way].append(simulated([*common, *settings], folder / "figures.json", options.steps) / real)
                gains[way].append(base / real)
                idle = ", ".join(f"{worker} {share:.0%}" for worker, share in figures["idle_share"].items())
                print(
                    f"{way:28} {real:6.3f} s a step, simulated {predicted:6.3f}; idle: {idle}; outside phases {figures['overhead_share']:.1%}",
                    flush=True,
                )
    for way in WAYS:
        print(
            f"{way:28} simulated over real {spread(ratios[way])}, own {spread(own[way])}; samples/s over max_lag 0 {spread(gains[way])}",
            flush=True,
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
