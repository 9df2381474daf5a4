"""Seconds until a run of the demo has its first token: to the first finished samples, with the warm-started model in the cache.

python tests/bench/start.py                     # three starts, each ended by SIGTERM when it has trained a step
python tests/bench/start.py --rounds 5 rollout.enforce_eager=false
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.tools.analysis.trace import read_spans
from rlsys.runs.directory import read_lines

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 300


def started(overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as place:
        run, began = Path(place) / "run", time.time()
        command = [sys.executable, "-m", "launch", "train", "configs/tiny_cpu.yaml", f"run.dir={run}", *overrides]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(read_lines(run / "metrics.jsonl")) < 2:
            if time.time() - began > LIMIT_S:
                raise SystemExit(f"no step after {LIMIT_S} s; pid {process.pid} is left as it is")
            time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        if process.wait():
            raise SystemExit(f"{command} ended with {process.returncode}")
        engines = [s for s in read_spans(run) if s.name == "generate" and s.facts["samples"]]
        return min(s.start + s.facts["samples"][0][2] for s in engines) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    started(options.overrides)  # the model is warm-started, where it is not there yet; files are read once
    seconds = [started(options.overrides) for _ in range(options.rounds)]
    print(
        f"{statistics.median(seconds):.1f} s to the first samples ({min(seconds):.1f} to {max(seconds):.1f}, {options.rounds} starts)"
    )


if __name__ == "__main__":
    main()
