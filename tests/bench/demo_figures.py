"""The figures of the demo: runs the demo for five seeds, its warm start included, and prints one line each.

.venv/bin/python tests/bench/demo_figures.py [KEY=VALUE]...        (`make figures`; nothing else should run meanwhile)
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from rlsys.runs.directory import read_lines

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
from records import stamp

ROOT = Path(__file__).parent.parent.parent
PHASES = ("step", "rollout", "reward", "score", "update", "sync")


def memory(process: psutil.Process) -> int:
    """Bytes of a process and all it started, shared pages counted once."""
    total = 0
    for p in [process, *process.children(recursive=True)]:
        try:
            total += p.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile
            continue
    return total


def measure(seed: int, overrides: list[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="figures-") as place:
        run, began, first, peak = Path(place) / "run", time.monotonic(), 0.0, 0
        command = [
            sys.executable,
            "-m",
            "launch",
            "train",
            "configs/tiny_cpu.yaml",
            f"run.seed={seed}",
            f"run.dir={run}",
        ]
        environment = os.environ | {"XDG_CACHE_HOME": place}  # no warm-started model there
        process = psutil.Popen([*command, *overrides], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, memory(process))
            if not first and len(read_lines(run / "metrics.jsonl")) > 1:
                first = time.monotonic() - began
            time.sleep(1)
        total = time.monotonic() - began
        lines = read_lines(run / "metrics.jsonl")
    accuracy = [line["eval/zigzag/accuracy"] for line in lines if "eval/zigzag/accuracy" in line]
    steps = lines[1:]
    times = " / ".join(f"{sum(line[f'time/{p}'] for line in steps) / len(steps):.3f}" for p in PHASES)
    return (
        f"seed {seed}: exit {process.returncode}, {total:.0f} s in all, {first:.0f} s to the first step, "
        f"accuracy {accuracy[0]:.1%} → {accuracy[-1]:.1%}, seconds per {' / '.join(PHASES)} {times}, "
        f"largest gap of log-probs {max(line['mismatch/max_abs'] for line in steps):.1e}, peak memory {peak / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    print(f"commit {stamp('demo_figures.py')}")
    for seed in range(5):
        print(measure(seed, sys.argv[1:]), flush=True)
