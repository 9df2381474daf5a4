"""Trains runs that differ in one choice, and shows how they end apart: curves and table of rlsys/algorithms/BIASES.md.

.venv/bin/python tests/bench/biases/bias_runs.py --seeds 0 1 2   runs that runs.jsonl has not, 1 to 2 minutes each; then draws
.venv/bin/python tests/bench/biases/bias_runs.py --draw          draws only, and prints the table of the modes
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import pyarrow.parquet
import ragged
from records import current, measuring

from rlsys.runs.directory import read_lines

HERE = Path(__file__).parent
ROOT, RESULTS = HERE.parents[2], HERE / "runs.jsonl"
PICTURES = ROOT / "rlsys" / "algorithms" / "pictures"
EVERY = 5  # steps that a point averages over
Curves = dict[str, list[float | None]]


@dataclass(frozen=True)
class Comparison:
    """Runs of one configuration that differ in one choice, and the curves that tell them apart."""

    config: str
    steps: int
    common: list[str]
    choices: dict[str, list[str]]
    curves: Callable[[Path], Curves]


# --- curves -----------------------------------------------------------------------------------------------------------


def held_out(run: Path) -> Curves:
    lines = [line for line in read_lines(run / "metrics.jsonl") if "eval/two_modes/accuracy" in line]
    return {
        "held-out accuracy": [line["eval/two_modes/accuracy"] for line in lines],
        "tokens of an answer": [line["eval/two_modes/length/mean"] for line in lines],
    }


def lengths(run: Path) -> Curves:
    return {
        "tokens of wrong answers": means(run, lambda s: len(s["tokens"]) if s["reward"] == 0 else None),
        "tokens of right answers": means(run, lambda s: len(s["tokens"]) if s["reward"] == 1 else None),
    }


def choices(run: Path) -> Curves:
    return {
        "share of even digits": means(run, lambda s: ragged.even(s["completion"])),
        "mean reward": means(run, lambda s: s["reward"]),
    }


def means(run: Path, value: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
    """The mean over the samples of each `EVERY` steps, leaving out those without a value."""
    columns = ["completion", "reward", "tokens"]
    steps = [
        pyarrow.parquet.read_table(file, columns=columns).to_pylist() for file in sorted(run.glob("samples/step-*"))
    ]
    blocks = [[s for step in steps[i : i + EVERY] for s in step] for i in range(0, len(steps), EVERY)]
    values = [[v for s in block if (v := value(s)) is not None] for block in blocks]
    return [round(fmean(block), 4) if block else None for block in values]


PAPERS_WEIGHT = "algorithm.control_weight=0.001"  # the default as well, which other weightings require
GRPO = ["algorithm.advantage=grpo", "algorithm.normalize=sequence_mean", PAPERS_WEIGHT]


def think(reward: float) -> str:
    """What a right answer after <think> earns; after <short> it earns 1."""
    return f"algorithm.control_tokens={{<short>: 1.0, <think>: {reward}}}"


COMPARISONS = {
    "two_modes": Comparison(
        "configs/two_modes_cpu.yaml",
        80,
        [],
        {
            "GRPO": [*GRPO, "algorithm.control_tokens={}"],
            **{f"GRPO, think {reward}": [*GRPO, think(reward)] for reward in (0.2, 0.5)},
            **{f"DeGRPO, think {reward}": [think(reward)] for reward in (0.2, 0.5)},
            "DeGRPO, think 0.5, weight 0.001": [think(0.5), PAPERS_WEIGHT],
        },
        held_out,
    ),
    "length": Comparison(
        "tests/bench/biases/ragged.yaml",
        60,
        ["reward.functions={'tests/bench/biases/ragged.py:even': 1.0}", "algorithm.advantage=dr_grpo"],
        {name: [f"algorithm.normalize={name}"] for name in ("sequence_mean", "constant")},
        lengths,
    ),
    "difficulty": Comparison(
        "tests/bench/biases/ragged.yaml",
        30,
        [
            "reward.functions={'tests/bench/biases/ragged.py:hidden_rows': 1.0}",
            "algorithm.normalize=constant",
            "trainer.prompts_per_step=16",
            "trainer.samples_per_prompt=32",
            "policy.lr=4e-4",
            "trainer.steps=30",
            "policy.lr_schedule_steps=60",
        ],
        {f"std: {name}": [f"algorithm.std={name}"] for name in ("sample", "none")},
        choices,
    ),
}

# --- runs -------------------------------------------------------------------------------------------------------------


def measure(name: str, choice: str, seed: int) -> dict[str, Any]:
    comparison = COMPARISONS[name]
    with measuring(RESULTS.name) as commit, tempfile.TemporaryDirectory(prefix="biases-") as place:
        model = []
        if comparison.config.endswith("ragged.yaml"):
            ragged.make_model(Path(place) / "model", seed)
            model = [f"model.path={place}/model"]
        overrides = [*comparison.common, *comparison.choices[choice], *model, f"run.seed={seed}"]
        command = [sys.executable, "-m", "launch", "train", comparison.config, *overrides, f"run.dir={place}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, {choice}, seed {seed}: exit {done.returncode}\n{done.stdout[-2000:]}")
        curves = comparison.curves(Path(place) / "run")
    return {"comparison": name, "choice": choice, "seed": seed, "commit": commit, "curves": curves}


# --- table ------------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """One row per choice of the two modes: tokens and accuracy of each seed at the end."""
    seeds = sorted({r["seed"] for r in results})
    rows = [["setting", *(f"seed {seed}" for seed in seeds), "commit"], ["---"] * (2 + len(seeds))]
    for choice in COMPARISONS["two_modes"].choices:
        own = {r["seed"]: r for r in results if r["choice"] == choice}
        ends = {seed: [curve[-1] for curve in r["curves"].values()] for seed, r in own.items()}
        cells = {seed: f"{tokens:.1f}, {100 * accuracy:.0f} %" for seed, (accuracy, tokens) in ends.items()}
        commits = sorted({f"`{r['commit']}`" for r in own.values()})
        rows.append([choice, *(cells.get(seed, "not run") for seed in seeds), " ".join(commits)])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


# --- pictures ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, STEP_COLORS = 300, 150, 40, 34, ("#c0504d", "#2f6fb3")


def draw(name: str, results: list[dict[str, Any]], steps: int) -> str:
    """An SVG with a panel per curve, a color per choice and a line per seed."""
    titles = list(results[0]["curves"])
    width = len(titles) * (WIDTH + LEFT + 16)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 42}" width="{width}" '
        'font-family="sans-serif" font-size="11" fill="#444">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, title in enumerate(titles):
        parts.append(f'<g transform="translate({i * (WIDTH + LEFT + 16) + LEFT},{TOP})">')
        parts += panel(title, [r for r in results if any(v is not None for v in r["curves"][title])], name, steps)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def panel(title: str, results: list[dict[str, Any]], name: str, steps: int) -> list[str]:
    values = [v for r in results for v in r["curves"][title] if v is not None]
    top = 1.0 if max(values) <= 1 else 1.1 * max(values)
    parts = [f'<text x="0" y="-20" font-weight="bold">{title}</text>']
    for y in (0, top / 2, top):
        at = HEIGHT * (1 - y / top)
        parts.append(
            f'<path d="M0 {at:.1f}H{WIDTH}" stroke="#ddd"/><text x="-6" y="{at + 4:.1f}" text-anchor="end">{y:.3g}</text>'
        )
    parts.append(
        f'<text x="0" y="{HEIGHT + 16}">step 0</text><text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{steps}</text>'
    )
    for color, choice in zip(STEP_COLORS, COMPARISONS[name].choices, strict=True):
        for result in results:
            if result["choice"] == choice:
                parts.append(
                    f'<path d="{path(result["curves"][title], top)}" fill="none" stroke="{color}" stroke-width="2"/>'
                )
    for i, (color, choice) in enumerate(zip(STEP_COLORS, COMPARISONS[name].choices, strict=True)):
        parts.append(f'<text x="{i * 110}" y="-6" fill="{color}">{choice}</text>')
    return parts


def path(values: list[float | None], top: float) -> str:
    points = [(i * WIDTH / (len(values) - 1), HEIGHT * (1 - v / top)) for i, v in enumerate(values) if v is not None]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def key(result: dict[str, Any]) -> tuple[str, str, int]:
    return result["comparison"], result["choice"], result["seed"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("comparisons", nargs="*", default=list(COMPARISONS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--draw", action="store_true")
    wanted = parser.parse_args()
    results = {key(r): r for r in read_lines(RESULTS)}
    if not wanted.draw:
        kept = {key(r) for r in current([*results.values()], RESULTS.name)}
        pairs = [(name, choice) for name in wanted.comparisons for choice in COMPARISONS[name].choices]
        for run in [(*pair, seed) for seed in wanted.seeds for pair in pairs if (*pair, seed) not in kept]:
            results[run] = measure(*run)
            print(json.dumps(results[run]), flush=True)
            RESULTS.write_text("".join(json.dumps(r) + "\n" for r in results.values()))
    print(table([r for r in results.values() if r["comparison"] == "two_modes"]))
    for name in ("length", "difficulty"):
        if mine := [r for r in results.values() if r["comparison"] == name]:
            (PICTURES / f"{name}.svg").write_text(draw(name, mine, COMPARISONS[name].steps))
