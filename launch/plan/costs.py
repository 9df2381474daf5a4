"""What each piece of work costs, from the timeline of a run: what `simulate` reckons with.

An engine's time is taken to be made of steps, of sequences that get a token in a step, and of tokens of prompts; a rank's of packs
and of tokens in them. The coefficients are those with which this comes closest to what was measured, none less than nothing.
"""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from launch.plan.simulate import Costs
from rlsys.config import ConfigError
from rlsys.run_directory import read_lines
from rlsys.trace import Span, spans
from rlsys.types import Metrics

PHASES = ("rollout", "reward", "score", "update", "sync")


def read(source: Path, prompt_tokens: int, option: str = "--simulate") -> Costs:
    """From a JSON file, `costs` of what `rlsys bench --json` writes or such a mapping itself, or from a run directory."""
    if source.is_dir():
        lines = [line for line in read_lines(source / "metrics.jsonl") if "time/step" in line]
        return measured(spans(source), lines, prompt_tokens)
    try:
        found = json.loads(source.read_text())
        return Costs(**found.get("costs", found))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        names = ", ".join(f.name for f in dataclasses.fields(Costs))
        raise ConfigError(
            f"{option} {source}: {error}. It takes a run directory, what `rlsys bench CONFIG --json FILE` writes, or a JSON file "
            f"with seconds for {names}."
        ) from None


def measured(found: list[Span], lines: list[Metrics], prompt_tokens: int) -> Costs:
    """`lines` are those of the steps that count; of spans, those between the first and the last of them."""
    steps = {s.facts["step"]: s for s in found if (s.worker, s.name) == ("driver", "step")}
    counted = [steps[int(line["step"])] for line in lines if line["step"] in steps]
    if not counted:
        raise ConfigError("nothing is recorded of the steps that are to be measured: costs need the timeline of a run.")
    begin, end = min(s.at for s in counted), max(s.end for s in counted)
    inside = [s for s in found if s.end > begin and s.at < end]
    of: defaultdict[str, list[Span]] = defaultdict(list)
    for s in inside:
        of[s.name].append(s)
    decoding = engine([s for s in of["generate"] if s.facts.get("samples")], prompt_tokens)
    updates, scores = rank(of["update"]), rank([s for s in of["score"] if s.worker != "driver"])
    other = fmean(line["time/step"] - sum(line[f"time/{name}"] for name in PHASES) for line in lines)
    return Costs(
        *decoding,
        score_s=scores[0] or updates[0] / 3,
        update_s=updates[0],
        pack_s=updates[1],
        optimizer_s=updates[2],
        sync_s=fmean([line["time/sync"] for line in lines if line["time/sync"]] or [0.0]),
        reward_s=fmean([line["time/reward"] for line in lines]),
        other_s=max(other, 0.0),
    )


def engine(generated: list[Span], prompt_tokens: int) -> tuple[float, float, float]:
    """Seconds of a step, of a sequence in it, and of a prompt's token.

    What counts is when the longest samples were finished: others may have waited for their stream.
    """
    rows, seconds = [], []
    for s in generated:
        lengths = np.array([tokens for _, _, _, tokens in s.facts["samples"]])
        prompts = len({uid for uid, _, _, _ in s.facts["samples"]})
        for part in (0.5, 0.75, 1.0):
            steps = np.quantile(lengths, part, method="higher")
            at = max(when for _, _, when, tokens in s.facts["samples"] if tokens <= steps)
            rows.append([steps, np.minimum(lengths, steps).sum(), prompts * prompt_tokens])
            seconds.append(at)
    step_s, sequence_s, prompt_s = never_negative(np.array(rows, dtype=float), np.array(seconds))
    return step_s, sequence_s, prompt_s


def rank(worked: list[Span]) -> tuple[float, float, float]:
    """Seconds of a token, of a pack, and of a call."""
    rows = [[s.facts["tokens"], s.facts["packs"], 1.0] for s in worked if "tokens" in s.facts]
    if not rows:
        return 0.0, 0.0, 0.0
    each, pack, call = never_negative(
        np.array(rows, dtype=float), np.array([s.seconds for s in worked if "tokens" in s.facts])
    )
    return each, pack, call


def never_negative(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Least squares, without the columns that would count less than nothing.  [N, C], [N] -> [C]"""
    kept = list(range(rows.shape[1])) if len(rows) else []
    found = [0.0] * rows.shape[1]
    while kept:
        scale = rows[:, kept].max(axis=0) + 1e-30
        solved = np.linalg.lstsq(rows[:, kept] / scale, seconds, rcond=1e-6)[0] / scale
        if (solved >= 0).all():
            for column, value in zip(kept, solved, strict=True):
                found[column] = float(value)
            break
        kept.pop(int(np.argmin(solved * scale)))
    return found
