"""Directories of runs, as a run leaves them, with figures and samples that a test chooses."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.config import loading
from rlsys.config.schema import Config, RunConfig, TrainerConfig
from rlsys.runs.samples import write_samples
from rlsys.tasks.zigzag import SYMBOLS
from rlsys.types import Batch, Columns, Prompt, Sample

EOS = SYMBOLS.index("<eos>")
BEGAN = 1_790_000_000.0


def make_run(
    path: Path,
    steps: int = 12,
    *,
    prompts: int = 4,
    samples: int = 4,
    config: Config | None = None,
    events: tuple[tuple[str, dict[str, Any]], ...] = (),
    texts: dict[int, str] | None = None,
    timeline: bool = True,
    saved: bool = True,
) -> Path:
    """A run that has learned. `texts` replaces a completion of the first group, by step."""
    for folder in ("samples", "logs", "checkpoints"):
        (path / folder).mkdir(parents=True)
    config = config or Config(
        run=RunConfig(dir=str(path)),
        trainer=TrainerConfig(steps=steps, prompts_per_step=prompts, samples_per_prompt=samples),
    )
    (path / "config.yaml").write_text(loading.to_yaml(config))
    lines = [figures(0, steps, evaluated=True)] + [figures(s, steps, evaluated=s % 4 == 0) for s in range(1, steps + 1)]
    write_lines(path / "metrics.jsonl", lines)
    events_of_run = [{"event": "start"}, {"event": "begin", "step": 0}]
    events_of_run += [{"event": "sync", "version": s} for s in range(steps + 1)]
    events_of_run += [{"event": kind} | facts for kind, facts in events] or [{"event": "done", "step": steps}]
    write_lines(path / "events.jsonl", [{"time": BEGAN + i} | e for i, e in enumerate(events_of_run)])
    if saved:
        save_samples(path / "samples", steps, prompts, samples, texts or {})
    if timeline:
        write_timeline(path / "logs", steps)
    return path


def figures(step: int, steps: int, evaluated: bool) -> dict[str, float]:
    share = step / steps
    wave = math.sin(1.7 * step)
    line: dict[str, float] = {"step": step}
    if evaluated:
        name = "eval/zigzag/accuracy"
        line |= {name: 0.2 + 0.7 * share, f"{name}/low": 0.15 + 0.7 * share, f"{name}/high": 0.25 + 0.7 * share}
    if step == 0:
        return line
    times = {"rollout": 0.3, "reward": 0.05, "score": 0.1, "update": 0.15, "sync": 0.03}
    return line | {
        "reward/mean": 0.2 + 0.7 * share + 0.03 * wave,
        "reward/std": 0.4,
        "reward/failed": 0.0,
        "groups/equal": 1.0,
        "groups/one_sample": 0.0,
        "groups/all_failed": 0.0,
        "groups/dropped": 0.0,
        "length/mean": 7.0 + wave,
        "length/max": 10.0,
        "length/truncated": 0.05,
        "tokens": 112.0,
        "loss": 0.01 * wave,
        "grad_norm": 0.5,
        "lr": 4e-4,
        "kl": 0.02 * share,
        "entropy": 1.5 - share,
        "clip_fraction": 0.02,
        "clip_fraction/low": 0.01,
        "clip_fraction/high": 0.01,
        "mismatch/mean_abs": 2e-7,
        "mismatch/max_abs": 5e-6,
        "advantage/max_abs": 3.0,
        "time/step": sum(times.values()) + 0.02,
        "tokens_per_second": 170.0,
        "sync/version": float(step),
        **{f"time/{name}": seconds for name, seconds in times.items()},
    }


def save_samples(folder: Path, steps: int, prompts: int, samples: int, texts: dict[int, str]) -> None:
    """Makes ten steps and copies them for the others, to save time."""
    for step in range(1, steps + 1):
        name = f"step-{step:06d}.parquet"
        if step > 10 and step not in texts:
            shutil.copy(folder / f"step-{step % 10 + 1:06d}.parquet", folder / name)
            continue
        batch = make_batch(step, prompts, samples, texts.get(step))
        rollout = np.concatenate([s.logprobs for s in batch.samples])
        advantages = batch.rewards - batch.rewards.mean()
        columns = Columns(np.repeat(advantages, batch.lengths), old=(rollout + np.float32(1e-6)).astype(np.float32))
        write_samples(folder / name, batch, advantages, columns)
    for step in range(0, steps + 1, 4):
        write_samples(folder / f"eval-{step:06d}.parquet", make_batch(step, 2, 1, None))


def make_batch(step: int, prompts: int, samples: int, text: str | None) -> Batch:
    rng = np.random.default_rng(step)
    prompts_of_batch = [
        Prompt(f"zigzag:{g + 1}#{step - 1}", "zigzag", f"{rng.integers(10**5, 10**6)}>", [1], {})
        for g in range(prompts)
    ]
    made = []
    for p in prompts_of_batch:
        for i in range(samples):
            length = int(rng.integers(3, 10))
            tokens = np.array([*rng.integers(2, 12, length), EOS], dtype=np.int32)
            completion = "".join(SYMBOLS[t] for t in tokens[:-1])
            logprobs = -rng.exponential(1.0, length + 1).astype(np.float32)
            made.append(Sample(p.uid, i, completion, tokens, logprobs, "length" if length == 9 else "stop", step))
    if text is not None:
        made[0] = replace(made[0], text=text)
    groups = np.repeat(np.arange(prompts), samples)
    rewards = rng.integers(0, 2, len(made)).astype(np.float32)
    return Batch(prompts_of_batch, made, groups, rewards, [{} for _ in made])


def ruin(file: Path) -> None:
    """Samples of a run that has diverged: no advantage is finite, nor are the first two log-probs of each."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file).to_pydict()
    table["advantage"] = [math.nan, math.inf] * (len(table["uid"]) // 2)
    for own in table["rollout_logprobs"]:
        own[:2] = [-math.inf, math.nan]
    pyarrow.parquet.write_table(pa.table(table), file)


def damage(file: Path, how: str) -> None:
    """`empty` as after a power loss, `cut` as an interrupted copy, `hollow` with zeros in place of completions."""
    import pyarrow.parquet

    whole = file.read_bytes()
    group = pyarrow.parquet.read_metadata(file).row_group(0)
    texts = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "completion")
    begin = texts.dictionary_page_offset or texts.data_page_offset
    end = begin + texts.total_compressed_size
    file.write_bytes(
        {"empty": b"", "cut": whole[:-100], "hollow": whole[:begin] + bytes(end - begin) + whole[end:]}[how]
    )


def write_timeline(logs: Path, steps: int) -> None:
    """Two engines, a rank and the driver; a step takes a second."""
    of: dict[str, list[dict[str, Any]]] = {"driver": [], "rollout-0": [], "rollout-1": [], "policy-0": []}
    for step in range(1, steps + 1):
        at = BEGAN + step
        of["driver"] += [
            {"span": "rollout", "at": at, "s": 0.5},
            {"span": "update", "at": at + 0.5, "s": 0.4},
            {"span": "step", "at": at, "s": 0.95, "step": step},
        ]
        for engine, seconds in (("rollout-0", 0.5), ("rollout-1", 0.4)):
            facts = {"requests": [["zigzag:1#0", 0, 0]], "samples": [["zigzag:1#0", 0, 0.3, 7]]}
            of[engine].append({"span": "generate", "at": at, "s": seconds} | facts)
        of["policy-0"].append({"span": "update", "at": at + 0.5, "s": 0.4, "packs": 2, "tokens": 112})
    for worker, lines in of.items():
        write_lines(logs / f"{worker}.spans", lines)


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
