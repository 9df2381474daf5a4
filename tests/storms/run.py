"""Storms: the real driver on a virtual clock, with workers, disks and signals that misbehave as a seed says.

python tests/storms/run.py                          10,000 schedules over all worlds, in two processes
python tests/storms/run.py engines --seed 123       one schedule, with its timeline
"""

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/storms"), str(ROOT / "tests/rlsys")]

from schedules import Outcome, run_schedule  # noqa: E402
from worlds import SHARES, WORLDS  # noqa: E402

CHUNK = 20  # schedules that a process runs at once


def run_chunk(world: str, first: int, count: int) -> list[Outcome]:
    outcomes = [run_schedule(WORLDS[world], seed) for seed in range(first, first + count)]
    for outcome in outcomes:
        if not outcome.problem:
            outcome.timeline = []
    return outcomes


def storm(chosen: list[str], schedules: int, first: int, processes: int, limit_s: float = math.inf) -> list[Outcome]:
    """Runs schedules of these worlds, at most for so long. Prints a line for each world, and what does not hold."""
    total = sum(SHARES[w] for w in chosen)
    chunks = [
        (i / count, world, first + i, min(CHUNK, count - i))
        for world in chosen
        for count in [max(1, round(schedules * SHARES[world] / total))]
        for i in range(0, count, CHUNK)
    ]
    outcomes: list[Outcome] = []
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(run_chunk, *zip(*[chunk[1:] for chunk in sorted(chunks)], strict=True)):
            outcomes += part
            if time.monotonic() - began > limit_s:
                pool.shutdown(cancel_futures=True)
                break
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for world in chosen:
        own = [o for o in outcomes if o.world == world]
        hours, faults = sum(o.seconds for o in own) / 3600, sum(o.faults for o in own)
        failed = sum(1 for o in own if o.problem)
        print(f"{world:9} {len(own):6,} schedules, {hours:7.1f} simulated hours, {faults:6,} faults: {failed} failed")
    print(f"{len(outcomes):,} schedules in {seconds:.0f} s, which took {busy:.0f} s of processors")
    for outcome in [o for o in outcomes if o.problem][:3]:
        show(outcome)
    counts = Counter(o.problem.splitlines()[-1][:100] for o in outcomes if o.problem)
    for problem, count in counts.most_common(8):
        print(f"{count:5}  {problem}")
    return outcomes


def show(outcome: Outcome) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(f"\nworld {outcome.world}, seed {outcome.seed}, commit {head.stdout.strip()}")
    print("\n".join(outcome.timeline))
    print(outcome.problem or f"all holds, after {outcome.seconds:.0f} simulated seconds and {outcome.faults} faults")
    print(f"again: python tests/storms/run.py {outcome.world} --seed {outcome.seed}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", nargs="?", choices=list(WORLDS), help="all, if left out")
    parser.add_argument("--seed", type=int, help="runs this schedule alone")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.seed is not None:
        outcome = run_schedule(WORLDS[given.world], given.seed)
        show(outcome)
        return int(bool(outcome.problem))
    outcomes = storm([given.world] if given.world else list(WORLDS), given.schedules, given.first, given.processes)
    return int(any(o.problem for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
