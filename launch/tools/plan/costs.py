"""What each piece of work costs, from the timeline of a run: what `simulate` reckons with.

An engine's time is taken to be made of steps, of sequences that get a token in a step, and of tokens of prompts; a rank's of packs
and of what is in them, attention included. The coefficients are those with which this comes closest to what was measured, none less than nothing.
"""

import dataclasses
import heapq
import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.tools.plan.lengths import read_run_lengths
from launch.tools.plan.simulated_workers import Costs
from rlsys.analysis.trace import Span, read_spans
from rlsys.config import loading
from rlsys.config.schema import Config, ConfigError
from rlsys.models.lookup import pairs_per_token
from rlsys.runs.directory import read_lines
from rlsys.types import Metrics

PHASES = ("rollout", "reward", "score", "update", "sync")


def read_costs(source: Path, prompt_tokens: int, option: str = "--simulate") -> Costs:
    """From a JSON file, `costs` of what `rlsys bench --json` writes or such a mapping itself, or from a run directory.

    `prompt_tokens`: of a prompt of the run, where that has kept no samples.
    """
    if source.is_dir():
        if (own := read_run_lengths(source)) and own.prompt:
            prompt_tokens = own.prompt
        lines = [line for line in read_lines(source / "metrics.jsonl") if "time/step" in line]
        return fit_costs(read_spans(source), lines, loading.load_config(source / "config.yaml"), prompt_tokens)
    try:
        found = json.loads(source.read_text())
        given = Costs(**found.get("costs", found))
        if wrong := [f"{name} is {json.dumps(value)}" for name, value in vars(given).items() if not is_seconds(value)]:
            raise ValueError(", ".join(wrong))
        return given
    except (OSError, ValueError, AttributeError, TypeError) as error:
        names = ", ".join(f.name for f in dataclasses.fields(Costs))
        raise ConfigError(
            f"{option} {source}: {error}. It takes a run directory, what `rlsys bench CONFIG --json FILE` writes, or a JSON file "
            f"with seconds, none less than 0, for {names}."
        ) from None


def is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def fit_costs(found: list[Span], lines: list[Metrics], config: Config, prompt_tokens: int) -> Costs:
    """Of a run of this configuration. `lines` are those of the steps that count; of spans, those between the first and the last of them."""
    steps = {s.facts["step"]: s for s in found if (s.worker, s.name) == ("driver", "step")}
    counted = [steps[int(line["step"])] for line in lines if line["step"] in steps]
    if not counted:
        raise ConfigError("nothing is recorded of the steps that are to be measured: costs need the timeline of a run.")
    begin, end = min(s.start for s in counted), max(s.end for s in counted)
    inside = [s for s in found if s.end > begin and s.start < end]
    of: defaultdict[str, list[Span]] = defaultdict(list)
    for s in inside:
        of[s.name].append(s)
    generated = [s for s in of["generate"] if s.facts.get("samples")]
    updated = [s for s in of["update"] if s.worker.startswith("policy-")]
    for spans_of, who in ((generated, "engines"), (updated, "policy ranks")):
        if not spans_of:
            raise ConfigError(
                f"costs need the timeline of the {who}, and there is none of these steps. A worker writes its own to logs/NAME.spans "
                "in the run directory: one on another host needs a directory that all hosts see."
            )
    decoding = fit_engine(generated, config.rollout.max_sequences, prompt_tokens)
    pair = 1 / pairs_per_token(config.model.path)
    updates = fit_rank(updated, pair)
    scores = fit_rank([s for s in of["score"] if s.worker.startswith(("policy-", "reference"))], pair)
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


@dataclass
class DecodedSample:
    """A sample as its engine drew it."""

    uid: str
    tokens: int  # that the engine drew
    begun: int  # tokens that were there before
    at: float  # seconds since 1970, when it was finished
    first: float = 0.0  # steps of the engine before its own, since it had nothing to do


def fit_engine(generated: list[Span], at_once: int, prompt_tokens: int) -> tuple[float, float, float]:
    """Seconds of a step, of a sequence in it, and of a prompt's token, from all streams of engines that decode so many `at_once`.

    What counts is when the last samples were finished that end by a step: others may have waited for their stream.
    """
    rows, seconds = [], []
    for worker in sorted({s.worker for s in generated}):
        for began, drawn in busy_periods([s for s in generated if s.worker == worker], at_once):
            drawn.sort(key=lambda d: d.first)
            first, tokens, begun, at = np.array([(d.first, d.tokens, d.begun, d.at - began) for d in drawn]).T
            last, read = first + tokens, begun > 0
            read[np.unique([d.uid for d in drawn], return_index=True)[1]] = True  # a prompt, once for its group
            parts = 4 * -(-len(drawn) // at_once)
            for step in np.quantile(last, np.arange(2, parts + 1) / parts, method="higher"):
                decoded = np.minimum(last, step) - np.minimum(first, step)
                rows.append([step, decoded.sum(), ((prompt_tokens + begun) * read)[first < step].sum()])
                seconds.append(at[last <= step].max())
    step_s, sequence_s, prompt_s = nonnegative_least_squares(np.array(rows, dtype=float), np.array(seconds))
    return step_s, sequence_s, prompt_s


def busy_periods(streams: list[Span], at_once: int) -> Iterator[tuple[float, list[DecodedSample]]]:
    """What one engine drew from when on, cut where it had nothing to do.

    First come, first decoded: a sample begins in the step in which another one leaves it a place, or where there is one, in the
    step of that moment, which lies between those of two that left.
    """
    waiting, running = (
        deque[DecodedSample](),
        list[tuple[float, float, int, DecodedSample]](),
    )  # running: by when it is finished, its last step
    order = itertools.count()

    def admit(step: float) -> None:
        while waiting and len(running) < at_once:
            one = waiting.popleft()
            one.first = step
            heapq.heappush(running, (one.at, step + one.tokens, next(order), one))

    found, began, now, step = list[DecodedSample](), 0.0, 0.0, 0.0
    arrivals = sorted(((s.start, asked(s)) for s in streams), key=lambda arrival: arrival[0])
    for at, some in [*arrivals, (math.inf, [])]:
        while running and running[0][0] <= at:
            now, step, _, one = heapq.heappop(running)
            found.append(one)
            admit(step)
        if running:
            due, then, *_ = running[0]
            step += max(then - step, 0.0) * (at - now) / (due - now)
        else:
            if found:
                yield began, found
            found, began, step = [], at, 0.0
        now = at
        waiting.extend(some)
        admit(step)


def asked(stream: Span) -> list[DecodedSample]:
    """Its samples in the order of their turns, which earlier versions did not record; what never came is left out."""
    ends = {(uid, index): (stream.start + when, tokens) for uid, index, when, tokens in stream.facts["samples"]}
    found = []
    for uid, index, begun in stream.facts.get("asked") or [(*key, 0) for key in ends]:
        if (uid, index) in ends:
            at, tokens = ends[uid, index]
            found.append(DecodedSample(uid, tokens - begun, begun, at))
    return found


def fit_rank(worked: list[Span], pair: float) -> tuple[float, float, float]:
    """Seconds of a token without attention, of a pack, and of a call. A pair of query and key counts as so many tokens."""
    rows = [[s.facts["tokens"] + s.facts.get("pairs", 0) * pair, s.facts["packs"], 1.0] for s in worked]
    if not rows:
        return 0.0, 0.0, 0.0
    each, pack, call = nonnegative_least_squares(np.array(rows, dtype=float), np.array([s.seconds for s in worked]))
    return each, pack, call


def nonnegative_least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
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
