"""What each way of being faster gains, alone and together, in one run: samples per second over those of the plain loop.

    python tests/bench/gains.py                  # 8 M parameters, about ten minutes a round
    python tests/bench/gains.py --rounds 3

The plain loop is on-policy, with two engines and two ranks on two cores, and nothing compiled. What is never left out has no line
here: `compute.py` measures shared prompts and silent groups.
"""

import argparse
import tempfile
from pathlib import Path

from bench_models import CASES, PROMPT, save_case
from simulate import LONGEST, run, spread

PAIRS = ["rollout.engines=2", "policy.ranks=2"]
AHEAD = ["rollout.engines=1", "policy.ranks=1", "pipeline.max_lag=1"]
IN_FLIGHT = [*AHEAD, "pipeline.in_flight=true"]
OVER = [
    "rollout.engines=1",
    "policy.ranks=1",
    "pipeline.max_lag=2",
    "pipeline.in_flight=true",
    "rollout.oversample=0.25",
]
ENGINES, RANKS = "rollout.enforce_eager=false", "policy.compile=true"
PLAIN = "the plain loop"
WAYS = {
    PLAIN: PAIRS,
    "engines compiled": [*PAIRS, ENGINES],
    "ranks compiled": [*PAIRS, RANKS],
    "one batch ahead": AHEAD,
    "one batch ahead, in flight": IN_FLIGHT,
    "one batch ahead, in flight, over-sampled": OVER,
    "engines and ranks compiled": [*PAIRS, ENGINES, RANKS],
    "both, and one batch ahead": [*AHEAD, ENGINES, RANKS],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="that count, of each run")
    options = parser.parse_args()
    gains: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_case(CASES["8m"], model)
        common = [f"model.path={model}", f"data.train={model / 'prompts.jsonl'}", "rollout.enforce_eager=true"]
        common += ["policy.compile=false", f"rollout.max_prompt_tokens={PROMPT}", f"rollout.max_new_tokens={LONGEST}"]
        for _ in range(options.rounds):
            rates: dict[str, float] = {}
            for way, settings in WAYS.items():
                rates[way] = run([*common, *settings], Path(name), options.steps)["samples_per_s"]
                gains[way].append(rates[way] / rates[PLAIN])
                print(f"{way:42} {rates[way]:6.1f} samples/s, {gains[way][-1]:.2f}", flush=True)
    for way, ratios in gains.items():
        print(f"{way:42} {spread(ratios)}")


if __name__ == "__main__":
    main()
