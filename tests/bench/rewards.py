"""Verdicts per second, and the time that one verdict takes, of a function that does nothing: what the reward pool itself costs."""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from launch.ray_session.connect import ray_session
from rlsys.checks import load_checked
from rlsys.types import NO_TOKENS, Prompt, Sample
from workers.fleet.watchdog import Watchdog
from workers.reward.pool import RewardPool, RewardWorker, ray_options, worker_numbers

SAMPLES, GROUP, ALONE = 20_000, 16, 200
ROOT = Path(__file__).parents[2]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trivial.py").write_text("def trivial(completion):\n    return 1.0\n")
        config = load_checked(ROOT / "configs" / "tiny_cpu.yaml", [f"reward.functions={folder}/trivial.py:trivial"])
        with ray_session(config, Path(folder)) as session:
            kind = session.ray.remote(RewardWorker).options(num_cpus=0, **ray_options(config))
            watch = Watchdog(Path(folder))
            pool = RewardPool(config, lambda name: kind.remote(config, *worker_numbers(name), folder), watch)
            pool.start()
            measure(pool)


def measure(pool: RewardPool) -> None:
    no_logprobs, prompts = np.zeros(0, np.float32), {"p": Prompt("p", "made", "2+2=", [], {"answer": "4"})}

    def samples(count: int) -> list[Sample]:
        return [Sample("p", i, "The answer is 4.", NO_TOKENS, no_logprobs, "stop", 0) for i in range(count)]

    pool.judge(samples(500), prompts).result()
    waits = []
    for _ in range(ALONE):
        began = time.perf_counter()
        pool.judge(samples(1), prompts).result()
        waits.append(time.perf_counter() - began)
    began = time.perf_counter()
    groups = [pool.judge(samples(GROUP), prompts) for _ in range(SAMPLES // GROUP)]
    assert all(v.score == 1.0 for group in groups for v in group.result())
    rate = SAMPLES / (time.perf_counter() - began)
    print(f"{rate:,.0f} verdicts/s; one alone after {statistics.median(waits) * 1000:.1f} ms (median of {ALONE})")


if __name__ == "__main__":
    main()
