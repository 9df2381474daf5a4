"""Samples per second against TRL's GRPOTrainer, on two cores, in alternating runs.

    python tests/bench/trl/compare.py                    # 8 M parameters, 128 tokens at most, mean about 60
    python tests/bench/trl/compare.py --case small       # 0.6 M parameters, every completion of 32 tokens
    python tests/bench/trl/compare.py --rounds 1 --steps 6 --only rlsys ahead
    python tests/bench/trl/compare.py --case gemma --rounds 3 --steps 1 --warm-up 1     # Gemma 3 270M, few-shot prompts, 4 tokens
    python tests/bench/trl/compare.py --case gemma64 --rounds 3 --steps 1 --warm-up 1   # and 64

Both get the same Hugging Face directory with random weights and 64 tokens, the same prompts (16 tokens each, so that TRL has none
to pad), 16 × 8 samples and one optimizer update per step, temperature 1, float32, no KL, a reward that costs nothing, and a learning
rate too small to move a weight: lengths stay as ragged as the weights make them. Gemma's prompts have 11 to 69 tokens, and
logits of 262,144 words leave no room for 128 samples at once. Each is run in several ways of sharing two cores,
and the fastest counts; one that was a tenth slower than it in the first round is not tried again. First steps are left out.

What a step of TRL does: it generates with `transformers`, all its samples at once until the longest is done, with its KV cache;
scores no old log-probs, as generation and update are in step; and makes one forward and backward pass over what it padded.
Gradient checkpointing, on by default, is off, and so are logging and saving. Larger and smaller micro-batches are tried, and
`torch_compile`.
What a step of rlsys does: all that `rlsys train` does, with its defaults, and engines and policy compiled. Samples come from vLLM in other processes; rewards are judged
in another; every sample is written to disk; the engines take the weights after each update and prove them, tensor by tensor.
`ahead` is rlsys with `pipeline.max_lag=1`: it samples the next batch while it trains on one, so samples are one update old.

TRL is installed into an environment of its own, by default in the user's cache. A way that fails in the first round, for lack of
memory, is left out. Finished runs are kept in rounds.json while options and code are the same, so that the work can be interrupted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from bench_models import CASES, GEMMA_CASES, Case, Gemma, link_gemma, save_case
from records import current, measuring, stamp

HERE = Path(__file__).parent
ROUNDS = HERE / "rounds.json"
ROOT = HERE.parents[2]
SAMPLES = 128
SIDES = ("rlsys", "ahead", "TRL")
Rates = dict[str, list[float]]  # samples per second, by way, in each round
PACKAGES = ["torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0"]


# name → what is different from its defaults
TRL: dict[str, dict[str, int]] = {
    "2 threads, 128 at once": {"threads": 2, "processes": 1, "micro": 128},
    "2 threads, 32 at once": {"threads": 2, "processes": 1, "micro": 32},
    "2 processes, 128 at once": {"threads": 1, "processes": 2, "micro": 128},
    "2 processes, 32 at once": {"threads": 1, "processes": 2, "micro": 32},
    "2 processes, 32 at once, compiled": {"threads": 1, "processes": 2, "micro": 32, "compile": True},
}
RLSYS = {
    "2 engines, 2 ranks": ["rollout.engines=2", "policy.ranks=2"],
    "2 engines, 1 rank of 2 threads": ["rollout.engines=2", "policy.ranks=1", "policy.threads=2"],
}
AHEAD = {"1 engine, 1 rank": ["rollout.engines=1", "policy.ranks=1", "pipeline.max_lag=1"]}
GEMMA = ["policy.zero_stage=0", "rollout.kv_cache_mb=1024"]
TWO_THREADS = ["rollout.engines=1", "rollout.threads=2", "policy.ranks=1", "policy.threads=2"]
WAYS: dict[str, dict[str, Any]] = {"rlsys": RLSYS, "ahead": AHEAD, "TRL": TRL}


def gemma_ways(samples: int) -> dict[str, dict[str, Any]]:
    """`samples` is how many TRL computes at once: more do not fit 24 GiB."""
    return {
        "rlsys": {"1 engine and 1 rank of 2 threads": [*TWO_THREADS, *GEMMA]},
        "ahead": {"1 engine, 1 rank": [*AHEAD["1 engine, 1 rank"], *GEMMA]},
        "TRL": {
            f"2 threads, {samples} at once": {"threads": 2, "processes": 1, "micro": samples},
            f"2 processes, {samples // 2} at once": {"threads": 1, "processes": 2, "micro": samples // 2},
        },
    }


GEMMA_WAYS = {"gemma": gemma_ways(32), "gemma64": gemma_ways(16)}


def installed(venv: Path) -> Path:
    """The Python of an environment with TRL in it."""
    python = venv / "bin" / "python"
    if not (venv / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        # torch first: a local wheel for CPU, where there is one, is then not replaced by a larger build
        for packages in (PACKAGES[:1], PACKAGES):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (venv / "installed").touch()
    return python


@dataclass(frozen=True)
class Run:
    seconds: float  # per step, median
    length: float  # tokens per completion, mean
    phases: dict[str, float]


def steady(ends: list[float], warm_up: int) -> float:
    return statistics.median(b - a for a, b in zip(ends[warm_up:], ends[warm_up + 1 :], strict=False))


class Failed(Exception):
    """A run of one of the two did not end well."""


def quietly(command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> None:
    """On two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with log.open("w") as out:
        ended = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    if ended.returncode:
        raise Failed(f"{command} ended with {ended.returncode}:\n{log.read_text()[-4000:]}")


def run_trl(
    python: Path, case: Case | Gemma, way: dict[str, int], folder: Path, steps: int, warm_up: int, seed: int
) -> Run:
    out = folder / "trl.json"
    settings = way | {
        "model": str(folder / "model"),
        "prompts": str(folder / "model" / "prompts.jsonl"),
        "out": str(out),
        "steps": steps + warm_up,
        "new_tokens": case.new_tokens,
        "seed": seed,
    }
    start: list[str | Path] = [python]
    if way["processes"] > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={way['processes']}"]
    environment = {
        "OMP_NUM_THREADS": str(way["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder),
    }
    quietly([*start, HERE / "grpo.py", json.dumps(settings)], folder / "trl.log", environment)
    results = json.loads(out.read_text())
    return Run(steady(results["ends"], warm_up - 1), results["length"], {})


def run_rlsys(case: Case | Gemma, way: list[str], folder: Path, steps: int, warm_up: int, seed: int) -> Run:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    settings = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'model' / 'prompts.jsonl'}",
        f"rollout.max_new_tokens={case.new_tokens}",
        f"trainer.steps={steps + warm_up}",
        f"run.dir={run}",
        f"run.seed={seed}",
    ]
    rlsys = Path(sys.executable).with_name("rlsys")
    quietly([rlsys, "train", HERE / "rlsys.yaml", *settings, *way], folder / "rlsys.log", {})
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [e["time"] for e in events if e["event"] == "sync" and e["version"]]
    lines = [line for line in lines if line["step"] > warm_up]
    phases = {
        name.removeprefix("time/"): statistics.median(line[name] for line in lines)
        for name in lines[0]
        if name.startswith("time/")
    }
    return Run(steady(ends, warm_up - 1), statistics.mean(line["length/mean"] for line in lines), phases)


def of(side: str, rates: Rates) -> Rates:
    return {name: values for name, values in rates.items() if name.startswith(side)}


def near_the_best(rates: Rates) -> list[str]:
    """The ways of each side that were not a tenth slower than its fastest in the first round."""
    return [
        name
        for side in SIDES
        for name, values in of(side, rates).items()
        if values[0] > 0.9 * max(other[0] for other in of(side, rates).values())
    ]


def key(options: argparse.Namespace) -> str:
    return f"{options.case}, {options.steps} steps after {options.warm_up}"


def saved_rates(options: argparse.Namespace) -> Rates:
    """Of finished runs with these options and this code."""
    saved = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else {}
    (result,) = current([saved.get(key(options), {})], Path(__file__).name) or [{"rates": {}}]
    return {label: rates for label, rates in result["rates"].items() if label.startswith(tuple(options.only))}


def save_rates(options: argparse.Namespace, rates: Rates) -> None:
    saved = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else {}
    all_sides = saved_rates(argparse.Namespace(**vars(options) | {"only": SIDES}))
    saved[key(options)] = {"commit": stamp(Path(__file__).name), "rates": all_sides | rates}
    ROUNDS.write_text(json.dumps(saved, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES | GEMMA_CASES, default="8m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="that count, of each run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--only", choices=SIDES, nargs="+", default=SIDES, help="not the others")
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "rlsys" / "bench-trl")
    options = parser.parse_args()
    case = (CASES | GEMMA_CASES)[options.case]
    ways_by_side = GEMMA_WAYS.get(options.case, WAYS)
    python = installed(options.venv) if "TRL" in options.only else Path()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        parameters = save_case(case, model) if isinstance(case, Case) else link_gemma(case, model)
        print(f"commit {stamp('compare.py')}, {parameters / 1e6:.2f} M parameters", flush=True)
        ways: dict[str, Callable[[int], Run]] = {}
        for side in ("rlsys", "ahead"):
            for label, settings in ways_by_side[side].items() if side in options.only else ():
                ways[f"{side}, {label}"] = lambda seed, s=settings: run_rlsys(  # type: ignore[misc]
                    case, s, folder, options.steps, options.warm_up, seed
                )
        if "TRL" in options.only:
            for label, way in ways_by_side["TRL"].items():
                ways[f"TRL, {label}"] = lambda seed, w=way: run_trl(  # type: ignore[misc]
                    python, case, w, folder, options.steps, options.warm_up, seed
                )
        rates: Rates = {label: [] for label in ways} | saved_rates(options)
        for i in range(options.rounds):
            for label in ways if i == 0 else near_the_best(rates):
                if len(rates[label]) > i:
                    continue
                try:
                    with measuring(Path(__file__).name):
                        result = ways[label](i)
                except Failed as error:
                    if i:
                        raise SystemExit(error) from error
                    print(f"{label}: left out. {error}", flush=True)
                    rates[label].append(0.0)
                    continue
                rates[label].append(SAMPLES / result.seconds)
                save_rates(options, rates)
                phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in result.phases.items())
                print(
                    f"{label:40} {result.seconds:7.3f} s a step, {rates[label][-1]:7.1f} samples/s, "
                    f"mean length {result.length:.1f}  {phases}",
                    flush=True,
                )
    best = {
        side: max(near_the_best(of(side, rates)), key=lambda w: statistics.median(rates[w])) for side in options.only
    }
    for label in best.values():
        print(
            f"best: {label}: {statistics.median(rates[label]):.1f} samples/s ({min(rates[label]):.1f} to {max(rates[label]):.1f})"
        )
    for side in best.keys() - {"TRL"} if "TRL" in best else ():
        ratios = [a / b for a, b in zip(rates[best[side]], rates[best["TRL"]], strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"
        print(f"{side} over TRL: {statistics.median(ratios):.2f} {spread}")


if __name__ == "__main__":
    main()
