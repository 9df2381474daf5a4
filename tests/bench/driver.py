"""What a step costs the driver itself: the real trainer and run directory, with machines behind it that take no time.

Samples are written by a thread of their own, beside the update, which here takes as long as that does, and much longer in a real
run. Its CPU time is shown apart. On a busy machine only CPU times mean something, and those too are longer than on one that is quiet.

python tests/bench/driver.py                     # 1,024 samples of 256 to 2,048 tokens
python tests/bench/driver.py --profile           # where the time of the longest goes
"""

import argparse
import cProfile
import math
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from rlsys.checks import load_checked
from rlsys.data import Dataset
from rlsys.runs import directory, samples
from rlsys.runs.directory import RunDirectory
from rlsys.runs.run_log import RunLog
from rlsys.trainer import Trainer
from rlsys.types import Floats, Metrics, Pack, Prompt, Request, Sample, Verdict

PROMPTS, SAMPLES, PROMPT_TOKENS, RANKS = 128, 8, 256, 8
VOCABULARY = 150_000
CONFIG = f"""
trainer: {{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}}}
policy: {{ranks: {RANKS}, tokens_per_pack: 32768}}
reference: {{kl_coef: 0.001}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
"""


P = ParamSpec("P")
T = TypeVar("T")


class Meter:
    """Seconds that the machines took, which are not the driver's, and CPU seconds of what is written in a thread."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.written = 0.0
        self.files = threading.Semaphore(0)  # that were written

    def __call__(self, method: Callable[P, T]) -> Callable[P, T]:
        def timed(*arguments: P.args, **options: P.kwargs) -> T:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return timed

    def writing(self, method: Callable[P, None]) -> Callable[P, None]:
        def timed(*arguments: P.args, **options: P.kwargs) -> None:
            began = time.thread_time()
            method(*arguments, **options)
            self.written += time.thread_time() - began
            self.files.release()

        return timed


class Engines:
    """Has every sample ready: random tokens and words, cut from a long row of them."""

    def __init__(self, tokens: int, meter: Meter):
        rng = np.random.default_rng(0)
        self.length, self.version = tokens, 0
        self.tokens = rng.integers(0, VOCABULARY, 64 * tokens).astype(np.int32)
        self.logprobs = -rng.exponential(size=64 * tokens).astype(np.float32)
        words = [f" {word:x}" for word in rng.integers(0, 16**3, 64 * tokens)]
        self.text = "".join(words)
        self.one = meter(self.one)  # type: ignore[method-assign]

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        for start in range(0, len(requests), SAMPLES):
            yield self.one(requests[start : start + SAMPLES])

    def one(self, requests: list[Request]) -> list[Sample]:
        n, found = self.length, []
        for r in requests:
            at = r.seed % (63 * n)
            tokens, logprobs = self.tokens[at : at + n].copy(), self.logprobs[at : at + n].copy()
            found.append(
                Sample(r.uid, r.index, self.text[4 * at : 4 * at + 4 * n], tokens, logprobs, "stop", self.version)
            )
        return found

    def stop_early(self) -> None: ...
    def wake(self) -> None: ...
    def sleep(self) -> None: ...


class Judges:
    def __init__(self, meter: Meter):
        self.judge = meter(self.judge)  # type: ignore[method-assign]

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> "Future[list[Verdict]]":
        done: Future[list[Verdict]] = Future()
        done.set_result([Verdict(float(s.tokens[0] % 2), {"exact": float(s.tokens[0] % 2)}) for s in samples])
        return done


class Ranks:
    """Policy or reference: log-probs are the engine's, so no step is diagnosed."""

    def __init__(self, ranks: int, engines: Engines, meter: Meter):
        self.ranks, self.engines, self.files = ranks, engines, meter.files
        self.score, self.update = meter(self.score), meter(self.update)  # type: ignore[method-assign]

    def score(self, packs: list[list[Pack]]) -> list[list[Floats]]:
        return [[p.rollout for p in own] for own in packs]

    def update(self, packs: list[list[Pack]], lr: float, kl_coef: float) -> dict[str, float]:
        self.files.acquire()
        names = ("loss", "grad_norm", "kl", "computed", "clip_low", "clip_high", "mismatch", "mismatch_max", "skipped")
        return dict.fromkeys(names, 0.0) | {
            "tokens": float(sum(len(p.targets) for own in packs for p in own)),
            "first_bad_sample": math.inf,
        }

    def sync(self, version: int) -> None:
        self.engines.version = version

    def save(self, folder: str) -> None: ...

    def saved_files(self, wait: bool) -> dict[str, str]:
        return {}

    def load(self, folder: str) -> None: ...
    def refresh(self) -> None: ...


class Stopwatch:
    """The trainer's progress: notes when each step's line was written."""

    def __init__(self, meter: Meter):
        self.meter, self.marks = meter, list[tuple[float, float, float]]()
        self.found: list[Metrics] = []

    def step(self, step: int, found: Metrics) -> None:
        m = self.meter
        self.marks.append((time.perf_counter() - m.wall, time.process_time() - m.cpu - m.written, m.written))
        self.found.append(found)

    def show_phase(self, phase: str) -> None: ...
    def note(self, text: str) -> None: ...


def measure(tokens: int, steps: int, profile: cProfile.Profile | None = None) -> list[list[float]]:
    """Of each step but the first: seconds, CPU seconds, and CPU seconds of writing samples."""
    meter = Meter()
    directory.write_samples = meter.writing(samples.write_samples)
    engines, watch = Engines(tokens, meter), Stopwatch(meter)
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(f"made:{i}", "made", "x" * 1024, rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist(), {"answer": str(i)})
        for i in range(4 * PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "driver.yaml"
        file.write_text(CONFIG)
        longest = [f"rollout.max_new_tokens={tokens}", f"trainer.steps={steps + 2}", f"run.dir={name}/run"]
        config = load_checked(file, longest)
        run = RunDirectory(config)
        trainer = Trainer(
            config,
            train=Dataset(prompts),
            evals=[],
            rollout=engines,
            rewards=Judges(meter),
            policy=Ranks(RANKS, engines, meter),
            reference=Ranks(1, engines, meter),
            critic=None,
            log=RunLog(run, watch),
            explain=lambda *_: AssertionError("engines and policy are the same here"),
        )
        if profile:
            profile.enable()
        trainer.run()
        if profile:
            profile.disable()
        run.close()
    pairs = zip(
        watch.marks[1:-2], watch.marks[2:-1], strict=True
    )  # without the first step, and the last with its checkpoint
    return [
        list(column) for column in zip(*((y - x for x, y in zip(a, b, strict=True)) for a, b in pairs), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile(time.process_time)
        measure(options.tokens[-1], options.steps, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    seconds_by_length: dict[int, list[list[float]]] = {tokens: [[], [], []] for tokens in options.tokens}
    for _ in range(options.rounds):
        for tokens, columns in seconds_by_length.items():
            for seconds, more in zip(columns, measure(tokens, options.steps), strict=True):
                seconds += more
    print(f"{PROMPTS * SAMPLES} samples, prompts of {PROMPT_TOKENS}, {RANKS} ranks, a reference; milliseconds per step")
    print("tokens   wall (median, least to most)   CPU (median, least to most)   CPU of writing samples")
    for tokens, columns in seconds_by_length.items():
        row = [
            f"{statistics.median(ms):6.0f}  {f'{min(ms):.0f} to {max(ms):.0f}':>15}"
            for ms in ([1000 * s for s in seconds] for seconds in columns)
        ]
        print(f"{tokens:6}   " + "      ".join(row))


if __name__ == "__main__":
    main()
