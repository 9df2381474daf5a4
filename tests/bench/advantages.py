"""How long each advantage estimator takes for 100,000 samples in 10,000 ragged groups, on one thread of a CPU.

.venv/bin/python tests/bench/advantages.py        (exits 1 if one takes more than 20 ms)

It is the thread's own time that counts, not the clock's, so that other processes disturb it little. gdpo has two components.
"""

import statistics
import sys
import time

import torch

from rlsys.algorithms.advantages import ESTIMATORS

SAMPLES, GROUPS, LIMIT, REPEATS = 100_000, 10_000, 20.0, 20  # LIMIT in ms


def median_ms(name: str) -> float:
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(0, GROUPS, (SAMPLES,), generator=generator)  # in no order, 10 of each on average
    columns = (SAMPLES, 2) if name == "gdpo" else (SAMPLES,)
    rewards = torch.rand(columns, generator=generator).round(decimals=1)
    lengths = torch.randint(1, 8192, (SAMPLES,), generator=generator)
    options = {"greedy": torch.rand(SAMPLES, generator=generator)} if name == "remax" else {}
    times = []
    for _ in range(1 + REPEATS):
        began = time.thread_time()
        ESTIMATORS[name](rewards, groups, lengths=lengths, **options)
        times.append(1000 * (time.thread_time() - began))
    return statistics.median(times[1:])  # the first is the warm-up


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{SAMPLES:,} samples in {GROUPS:,} groups, torch {torch.__version__}, median of {REPEATS}\n")
    medians = {name: median_ms(name) for name in ESTIMATORS}
    for name, ms in medians.items():
        print(f"{name:24}{ms:8.2f} ms   {'ok' if ms <= LIMIT else f'more than {LIMIT:.0f} ms'}")
    sys.exit(any(ms > LIMIT for ms in medians.values()))
