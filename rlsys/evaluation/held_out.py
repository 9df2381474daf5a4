"""Metrics on held-out prompts: accuracy, pass@k and maj@k, each with its interval, per source and over all sources.

A prompt counts once, however many samples it has. A sample whose verdict failed never counts as zero: it is excluded
from all means and counted separately. avg@n, pass@k and maj@k are means over the prompts that have n or k samples left.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlsys.episodes.figures import episode_figures
from rlsys.errors import ConfigError
from rlsys.evaluation.passk import maj_at_k, pass_at_k
from rlsys.evaluation.significance import bootstrap_interval
from rlsys.sampling.collector import Collector
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Metrics, Prompt

ALL = "all"  # takes the place of the source in metrics over all of them
Array = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOutSet:
    """A data set to evaluate on, and how. `HeldOutSet("aime", prompts, samples=16, temperature=0.6)`"""

    name: str
    prompts: Sequence[Prompt]
    samples: int = 1
    temperature: float = 0.0  # 0: greedy
    max_new_tokens: int = 512
    top_p: float = 1.0
    top_k: int = -1  # -1: from all tokens

    @property
    def longest_sequence(self) -> int:
        """The length of the longest prompt with the longest completion, in tokens."""
        return self.longest_prompt + (self.max_new_tokens if self.samples else 0)

    @property
    def longest_prompt(self) -> int:
        return max(len(p.tokens) for p in self.prompts)

    @property
    def plan(self) -> SamplingPlan:
        return SamplingPlan(self.samples, self.temperature, self.max_new_tokens, self.top_p, self.top_k)


@dataclass(frozen=True)
class MeanWithInterval:
    """A mean over prompts with its 95 % interval. `MeanWithInterval(0.625, 0.58, 0.67, prompts=500)`"""

    value: float
    low: float
    high: float
    prompts: int  # that the mean is over


@dataclass(frozen=True)
class SourceScore:
    """The scores of a source. `means` has accuracy, avg@n, pass@k and maj@k, by these names."""

    prompts: int
    samples: int
    failed: int  # samples whose verdict failed
    mean_length: float  # in tokens
    truncated_share: float  # of samples, truncated at the longest completion
    means: dict[str, MeanWithInterval] = field(default_factory=dict)  # empty if every verdict failed
    episodes: Metrics = field(default_factory=dict)  # as in training; empty for single answers

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, mean in self.means.items():
            metrics |= {name: mean.value, f"{name}/low": mean.low, f"{name}/high": mean.high}
            if mean.prompts < self.prompts:
                metrics[f"{name}/prompts"] = mean.prompts
        counts = {"prompts": self.prompts, "samples": self.samples, "failed": self.failed}
        lengths = {"length/mean": self.mean_length, "length/truncated": self.truncated_share}
        return metrics | counts | lengths | self.episodes


@dataclass(frozen=True)
class Evaluation:
    """An evaluated batch, and `scores` by source, with those of `all` if there are several sources."""

    batch: Batch
    scores: dict[str, SourceScore]

    def metrics(self) -> dict[str, float]:
        metrics = {
            f"eval/{name}/{k}": float(v) for name, score in self.scores.items() for k, v in score.metrics().items()
        }
        return metrics | {f"eval/failure/{reason}": float(n) for reason, n in self.batch.failures.items()}


def evaluate(
    collector: Collector,
    held_out: Sequence[HeldOutSet],
    *,
    step: int,
    pass_score: float,
    seed: int,
) -> Evaluation:
    """Samples all sets at once, each with its own settings, from the weights of version `step`."""
    held_out = make_uids_unique(held_out)
    name = f"eval {step}"
    requests = [request for h in held_out for request in h.plan.requests(collector.seed, name, h.prompts)]
    batch = collector.generate_and_judge(name, [p for h in held_out for p in h.prompts], requests)
    collector.raise_if_too_many_failures(name, batch)
    everything = [*batch.samples, *(s for s, _ in batch.failed)]
    if stale := {s.version for s in everything if len(s.tokens)} - {step}:  # an episode may fail before its first turn
        raise RuntimeError(f"evaluation of step {step}: the engines sampled from the weights of step {min(stale)}.")
    return Evaluation(batch, score_sources(held_out, batch, pass_score=pass_score, seed=seed))


def make_uids_unique(held_out: Sequence[HeldOutSet]) -> list[HeldOutSet]:
    """Returns the same sets without repeated uids.

    A file may be in two sets, and two files with one source may share uids.
    """
    taken: set[str] = set()
    unique = []
    for i, h in enumerate(held_out):
        if any(p.uid in taken for p in h.prompts):
            name = h.name if all(h.name != other.name for other in held_out[:i]) else f"{h.name}@{i}"
            h = replace(h, prompts=[replace(p, uid=f"{p.uid}@{name}") for p in h.prompts])
        taken |= {p.uid for p in h.prompts}
        unique.append(h)
    return unique


def metric_names(held_out: Sequence[HeldOutSet]) -> list[tuple[str, int]]:
    """Returns for each prompt of all sets the name of its metrics, and its number of samples.

    The name is the prompt's source, or `source@set` if two sets sample or judge the prompts of a source differently.
    """
    settings = defaultdict(set)
    for h in held_out:
        for p in h.prompts:
            settings[p.source].add((h.plan, p.rewards))
    names = [
        (p.source if len(settings[p.source]) == 1 else f"{p.source}@{h.name}", h.samples)
        for h in held_out
        for p in h.prompts
    ]
    if len({name for name, _ in names}) > 1 and ALL in settings:
        raise ConfigError(
            f"eval.datasets: a source is called `{ALL}`, as the metrics over all sources are. Give it another name."
        )
    return names


def score_sources(
    held_out: Sequence[HeldOutSet], batch: Batch, *, pass_score: float, seed: int
) -> dict[str, SourceScore]:
    """Returns the scores by source. The batch has the prompts of all sets, in order."""
    names = metric_names(held_out)
    columns = metrics_by_prompt(batch, values_of_k({n for _, n in names}), pass_score=pass_score, seed=seed)
    members: dict[str, list[int]] = {}
    for g, (name, _) in enumerate(names):
        members.setdefault(name, []).append(g)
    members = dict(sorted(members.items())) | ({ALL: list(range(len(names)))} if len(members) > 1 else {})
    return {name: score_prompts(batch, columns, gs, {names[g][1] for g in gs}, seed) for name, gs in members.items()}


def score_prompts(
    batch: Batch, columns: dict[str, Array], members: list[int], sizes: set[int], seed: int
) -> SourceScore:
    """Returns the scores of the prompts `members`, which have the numbers of samples `sizes`."""
    chosen = np.zeros(len(batch.prompts), dtype=bool)
    chosen[members] = True
    uids = {batch.prompts[g].uid for g in members}
    samples = [s for s, g in zip(batch.samples, batch.groups, strict=True) if chosen[g]]
    failed = [s for s, _ in batch.failed if s.uid in uids]
    everything, n = samples + failed, max(sizes)
    names = ["accuracy", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in values_of_k(sizes) if n > 1)]
    values = {name: columns[name][members] for name in names if not np.isnan(columns[name][members]).all()}
    if len(sizes) == 1 and f"pass@{n}" in values:
        values[f"avg@{n}"] = np.where(np.isnan(values[f"pass@{n}"]), np.nan, values["accuracy"])
    bounds = bootstrap_interval(np.stack(list(values.values()), axis=1), seed=seed) if values else np.empty((0, 2))
    return SourceScore(
        prompts=len(members),
        samples=len(everything),
        failed=len(failed),
        mean_length=float(np.mean([len(s.tokens) for s in everything])),
        truncated_share=float(np.mean([s.truncated for s in everything])),
        means={
            name: MeanWithInterval(float(np.nanmean(column)), float(low), float(high), int((~np.isnan(column)).sum()))
            for (name, column), (low, high) in zip(values.items(), bounds, strict=True)
        },
        episodes=episode_figures(samples, failed),
    )


def metrics_by_prompt(batch: Batch, ks: list[int], *, pass_score: float, seed: int) -> dict[str, Array]:
    """Returns every metric of every prompt, NaN where it has none.  name -> [prompts]"""
    prompts = range(len(batch.prompts))
    rewards: list[list[float]] = [[] for _ in prompts]
    votes: list[list[str]] = [[] for _ in prompts]
    answers = batch.answers or [None] * len(batch.samples)
    for g, reward, answer, sample in zip(batch.groups, batch.rewards, answers, batch.samples, strict=True):
        rewards[g].append(float(reward))
        votes[g].append(sample.text.strip() if answer is None else answer)
    count = np.array([len(r) for r in rewards])
    good = batch.rewards >= np.float32(pass_score)  # 0.9 in single precision is less than 0.9 in double
    solved = np.bincount(batch.groups, weights=good, minlength=len(prompts)).astype(np.int64)
    metrics = {"accuracy": np.array([np.mean(r) if r else np.nan for r in rewards])}
    for k in ks:
        metrics[f"pass@{k}"] = np.full(len(prompts), np.nan)
        metrics[f"pass@{k}"][count >= k] = pass_at_k(count[count >= k], solved[count >= k], k)
    for k in ks:
        metrics[f"maj@{k}"] = np.array(
            [maj_at_k(v, r, k, seed=seed) if len(r) >= k else np.nan for v, r in zip(votes, rewards, strict=True)]
        )
    return metrics


def values_of_k(sizes: set[int]) -> list[int]:
    """Returns the k of pass@k: 1, 2, 4, … and the numbers of samples themselves.  {6} -> 1 2 4 6"""
    return sorted({1 << i for i in range(max(sizes).bit_length())} | sizes)
