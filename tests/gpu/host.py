"""How fast this host is at what the core of an engine does for each step: two figures to hold beside all others of a GPU.

    python tests/gpu/host.py

vLLM's own scheduler, and ours, plan and read steps of 256 sequences that a model of arithmetic samples: ms of CPU time, no GPU. Records
without them cannot be compared with those of another host.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEQUENCES, STEPS, WARM_UP = 256, 90, 10


def host_figures() -> dict[str, float]:
    """Measured in a process of its own: vLLM is imported there, and a GPU is left alone."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{__file__} ended with {done.returncode}.")
    print(done.stdout.splitlines()[-1], flush=True)
    return dict(json.loads(done.stdout.splitlines()[-1])["host_ms_a_step"])


def step_ms(build: Any) -> float:
    from core_scheduler import Core, make_request, make_scheduler  # type: ignore[import-not-found]  # in tests/workers/rollout

    sizes = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 8192}
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(Path(folder), build, blocks=SEQUENCES * 8, **sizes)
    for i in range(SEQUENCES):
        scheduler.add_request(make_request(str(i), [3 + i // 8] * 16, STEPS + 2 * WARM_UP))
    core, seconds = Core(scheduler), 0.0
    sample = core.sample
    for step in range(WARM_UP + STEPS):
        began, sampling = time.thread_time(), 0.0

        def timed(planned: Any) -> Any:
            nonlocal sampling
            start = time.thread_time()
            try:
                return sample(planned)
            finally:
                sampling = time.thread_time() - start

        core.sample = timed  # type: ignore[method-assign]
        core.step()
        if step >= WARM_UP:
            seconds += time.thread_time() - began - sampling
    return 1e3 * seconds / STEPS


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "workers" / "rollout")]
    from core_scheduler import plain  # type: ignore[import-not-found]

    from workers.rollout.output_blocks import build_scheduler

    figures = {"vllm": step_ms(plain), "rlsys": step_ms(build_scheduler)}
    print(json.dumps({"host_ms_a_step": {name: round(ms, 2) for name, ms in figures.items()}}), flush=True)


if __name__ == "__main__":
    main()
