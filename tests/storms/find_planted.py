"""How many schedules each planted fault takes: `python tests/storms/find_planted.py [words]`."""

import sys
import time

import run  # noqa: F401  sets the path
from planted import PLANTED
from schedules import run_schedule
from worlds import WORLDS

for name, planted in PLANTED.items():
    if not all(word in f"{planted.world} {name}" for word in sys.argv[1:]):
        continue
    began = time.process_time()
    with planted.in_place():
        for seed in range(1000):
            outcome = run_schedule(WORLDS[planted.world], seed)
            if outcome.problem:
                break
    found = outcome.problem.splitlines()[-1][:110] if outcome.problem else "NOT FOUND"
    print(f"{name}: seed {seed}, {time.process_time() - began:.1f} s: {found}", flush=True)
