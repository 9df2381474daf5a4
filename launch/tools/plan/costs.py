"""Derives the cost of each piece of work from the timeline of a run, for the simulator.

The time of an engine is modeled as a sum over steps, over sequences that get a token in a step, and over prompt tokens.
The time of a rank is a sum over packs and over their tokens, attention included. The coefficients are a least-squares
fit to the measured times; none is negative.
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

from launch.tools.analysis.trace import Span, read_spans
from launch.tools.plan.lengths import read_run_lengths
from launch.tools.plan.simulated_workers import Costs
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.models.lookup import pairs_per_token
from rlsys.runs.directory import read_lines
from rlsys.types import Metrics

PHASES = ("rollout", "reward", "score", "update", "sync")


def read_costs(source: Path, prompt_tokens: int, option: str = "--simulate") -> Costs:
    """Reads costs from a run directory, from a file of `rlsys bench --json`, or from a JSON file with the costs alone.

    `prompt_tokens` is the length of prompts for a run that has no samples.
    """
    if source.is_dir():
        if (lengths := read_run_lengths(source)) and lengths.prompt:
            prompt_tokens = lengths.prompt
        lines = [line for line in read_lines(source / "metrics.jsonl") if "time/step" in line]
        return fit_costs(read_spans(source), lines, loading.load_config(source / "config.yaml"), prompt_tokens)
    try:
        contents = json.loads(source.read_text())
        costs = Costs(**contents.get("costs", contents))
        if wrong := [f"{name} is {json.dumps(value)}" for name, value in vars(costs).items() if not is_seconds(value)]:
            raise ValueError(", ".join(wrong))
        return costs
    except (OSError, ValueError, AttributeError, TypeError) as error:
        names = ", ".join(f.name for f in dataclasses.fields(Costs))
        raise ConfigError(
            f"{option} {source}: {error}. It takes a run directory, what `rlsys bench CONFIG --json FILE` writes, or a "
            f"JSON file with seconds, none less than 0, for {names}."
        ) from None


def is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def fit_costs(spans: list[Span], lines: list[Metrics], config: Config, prompt_tokens: int) -> Costs:
    """Fits costs to the steps in `lines`, and to all spans between the first and the last of these steps."""
    steps = {s.facts["step"]: s for s in spans if (s.worker, s.name) == ("driver", "step")}
    measured = [steps[int(line["step"])] for line in lines if line["step"] in steps]
    if not measured:
        raise ConfigError("nothing is recorded of the steps that are to be measured: costs need the timeline of a run.")
    begin, end = min(s.start for s in measured), max(s.end for s in measured)
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.end > begin and span.start < end:
            by_name[span.name].append(span)
    generated = [s for s in by_name["generate"] if s.facts.get("samples")]
    updated = [s for s in by_name["update"] if s.worker.startswith("policy-")]
    require_spans(generated, "engines")
    require_spans(updated, "policy ranks")
    step_s, sequence_s, prompt_s = fit_engine(generated, config.rollout.max_sequences, prompt_tokens)
    pair = 1 / pairs_per_token(config.model.path)
    update_s, pack_s, optimizer_s = fit_rank(updated, pair)
    score_s, *_ = fit_rank([s for s in by_name["score"] if s.worker.startswith(("policy-", "reference"))], pair)
    other = fmean(line["time/step"] - sum(line[f"time/{name}"] for name in PHASES) for line in lines)
    return Costs(
        step_s,
        sequence_s,
        prompt_s,
        score_s=score_s or update_s / 3,
        update_s=update_s,
        pack_s=pack_s,
        optimizer_s=optimizer_s,
        sync_s=fmean([line["time/sync"] for line in lines if line["time/sync"]] or [0.0]),
        reward_s=fmean([line["time/reward"] for line in lines]),
        other_s=max(other, 0.0),
    )


def require_spans(spans: list[Span], role: str) -> None:
    if not spans:
        raise ConfigError(
            f"costs need the timeline of the {role}, and there is none of these steps. A worker writes its own to "
            "logs/NAME.spans in the run directory: one on another host needs a directory that all hosts see."
        )


@dataclass
class DecodedSample:
    """A sample as an engine has decoded it."""

    uid: str
    tokens: int  # that this engine decoded
    prefix: int  # tokens of the completion that existed before
    at: float  # when it finished, in seconds since 1970
    first: float = 0.0  # steps of the engine before its own, in this busy period


def fit_engine(generated: list[Span], at_once: int, prompt_tokens: int) -> tuple[float, float, float]:
    """Seconds of a step, of a sequence in a step, and of a prompt token, from all calls of engines.

    `at_once` is the number of sequences that an engine decodes. Each row of the fit is a step, and its time is that of
    the last sample that finished by then: an earlier one may have waited for its call to return.
    """
    rows, seconds = [], []
    for worker in sorted({s.worker for s in generated}):
        for began, samples in busy_periods([s for s in generated if s.worker == worker], at_once):
            samples.sort(key=lambda d: d.first)
            first, tokens, prefix, at = np.array([(d.first, d.tokens, d.prefix, d.at - began) for d in samples]).T
            last, prefilled = first + tokens, prefix > 0
            prefilled[np.unique([d.uid for d in samples], return_index=True)[1]] = True  # once for each group
            parts = 4 * -(-len(samples) // at_once)
            for step in np.quantile(last, np.arange(2, parts + 1) / parts, method="higher"):
                decoded = np.minimum(last, step) - np.minimum(first, step)
                rows.append([step, decoded.sum(), ((prompt_tokens + prefix) * prefilled)[first < step].sum()])
                seconds.append(at[last <= step].max())
    step_s, sequence_s, prompt_s = nonnegative_least_squares(np.array(rows, dtype=float), np.array(seconds))
    return step_s, sequence_s, prompt_s


def busy_periods(calls: list[Span], at_once: int) -> Iterator[tuple[float, list[DecodedSample]]]:
    """Periods in which one engine was never idle: when each began, and its samples.

    Requests are decoded in the order of their arrival. A sample begins in the step in which another sample makes room.
    If there is room at its arrival, it begins in the step of that time, interpolated between two finished samples.
    """
    waiting: deque[DecodedSample] = deque()
    running: list[tuple[float, float, int, DecodedSample]] = []  # heap: when it finishes, its last step, order
    order = itertools.count()

    def admit(step: float) -> None:
        while waiting and len(running) < at_once:
            sample = waiting.popleft()
            sample.first = step
            heapq.heappush(running, (sample.at, step + sample.tokens, next(order), sample))

    finished, began, now, step = list[DecodedSample](), 0.0, 0.0, 0.0
    arrivals = sorted(((call.start, samples_in_order(call)) for call in calls), key=lambda arrival: arrival[0])
    for at, samples in [*arrivals, (math.inf, [])]:
        while running and running[0][0] <= at:
            now, step, _, sample = heapq.heappop(running)
            finished.append(sample)
            admit(step)
        if running:
            due, last, *_ = running[0]
            step += max(last - step, 0.0) * (at - now) / (due - now)
        else:
            if finished:
                yield began, finished
            finished, began, step = [], at, 0.0
        now = at
        waiting.extend(samples)
        admit(step)


def samples_in_order(call: Span) -> list[DecodedSample]:
    """The samples of a call in the order of their requests, without requests that never finished."""
    ends = {(uid, index): (call.start + seconds, tokens) for uid, index, seconds, tokens in call.facts["samples"]}
    samples = []
    for uid, index, prefix in call.facts["requests"]:
        if (uid, index) in ends:
            at, tokens = ends[uid, index]
            samples.append(DecodedSample(uid, tokens - prefix, prefix, at))
    return samples


def fit_rank(calls: list[Span], pair: float) -> tuple[float, float, float]:
    """Seconds of a token, of a pack, and of a call. A pair of query and key costs as much as `pair` tokens."""
    rows = [[s.facts["tokens"] + s.facts.get("pairs", 0) * pair, s.facts["packs"], 1.0] for s in calls]
    if not rows:
        return 0.0, 0.0, 0.0
    token, pack, call = nonnegative_least_squares(np.array(rows, dtype=float), np.array([s.seconds for s in calls]))
    return token, pack, call


def nonnegative_least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Least squares, without the columns that would get a negative coefficient.  [N, C], [N] -> [C]"""
    columns = list(range(rows.shape[1])) if len(rows) else []
    coefficients = [0.0] * rows.shape[1]
    while columns:
        scale = rows[:, columns].max(axis=0) + 1e-30
        solution = np.linalg.lstsq(rows[:, columns] / scale, seconds, rcond=1e-6)[0] / scale
        if (solution >= 0).all():
            for column, value in zip(columns, solution, strict=True):
                coefficients[column] = float(value)
            break
        columns.pop(int(np.argmin(solution * scale)))
    return coefficients
