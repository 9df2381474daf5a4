"""The metrics of a step, each computed from its definition. Names are those in `metrics.jsonl`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from rlsys.algorithms.credit import Credit
from rlsys.episodes.figures import episode_figures
from rlsys.runs.timeline import span
from rlsys.sampling.dynamic_sampling import informative_groups
from rlsys.types import Batch, Metrics
from rlsys.updates import StepUpdates


class PhaseTimer:
    """Measures seconds per phase, and records each phase as a span of the driver's timeline.

    timer = PhaseTimer(); with timer("update"): ...; timer.metrics()["time/update"]
    """

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """`on_phase` is called with the name of each phase when it begins."""
        self.on_phase = on_phase
        self.start = time.perf_counter()
        self.phases = dict.fromkeys(("rollout", "reward", "score", "update", "sync"), 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.on_phase(phase)
        try:
            with span(phase):
                yield
        finally:
            self.phases[phase] += time.perf_counter() - start

    def move_seconds(self, phase: str, other: str, seconds: float) -> None:
        """Moves up to `seconds` from one phase to another."""
        moved = min(seconds, self.phases[phase])
        self.phases[phase] -= moved
        self.phases[other] += moved

    def metrics(self) -> Metrics:
        phases = {f"time/{name}": seconds for name, seconds in self.phases.items()}
        return {"time/step": time.perf_counter() - self.start} | phases


def batch_metrics(batch: Batch, by_component: bool = False) -> Metrics:
    """Rewards, lengths, and how many groups are informative; `by_component` as in `informative_groups`."""
    rewards, lengths = batch.rewards, batch.lengths
    sizes = np.bincount(batch.groups, minlength=len(batch.prompts))
    metrics: Metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "reward/requested": float(batch.requested),
        "reward/failed": float(sum(batch.failures.values())),
        "groups/one_sample": float((sizes == 1).sum()),
        "groups/all_failed": float((sizes == 0).sum()),
        "groups/equal": float((~informative_groups(batch, by_component) & (sizes > 1)).sum()),
        "groups/dropped": float(batch.dropped_groups),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([s.truncated for s in batch.samples])),
        "tokens": float(lengths.sum()),
    }
    metrics |= {f"failure/{reason}": float(n) for reason, n in batch.failures.items()}
    if batch.deferred:
        metrics["groups/deferred"] = float(len(batch.deferred))
    return metrics | component_metrics(batch) | episode_figures(batch.samples, [s for s, _ in batch.failed])


def demonstration_metrics(batch: Batch) -> Metrics:
    """Lengths of what supervised training learns."""
    lengths = batch.lengths
    return {"length/mean": float(lengths.mean()), "length/max": float(lengths.max()), "tokens": float(lengths.sum())}


def component_metrics(batch: Batch) -> Metrics:
    """The mean of each reward component, if there are several."""
    names = sorted({name for components in batch.components for name in components})
    if len(names) < 2:
        return {}
    return {f"reward/component/{n}": float(np.mean([c[n] for c in batch.components if n in c])) for n in names}


def sampled_entropy(batch: Batch) -> Metrics:
    """The entropy per token of the policy that sampled: the mean of minus the engines' log-probs.

    Its expectation is the entropy, but only over all tokens. A mean over those of some groups is biased: groups with
    equal rewards have likely tokens.
    """
    tokens = int(batch.lengths.sum())
    total = sum(float(s.logprobs.sum(dtype=np.float64)) for s in batch.samples)
    return {"entropy": max(-total / tokens, 0.0)} if tokens else {}


def lag_metrics(step: int, batch: Batch) -> Metrics:
    """How many updates lie between the weights that sampled a token and the weights that it trains."""
    tokens = int(batch.lengths.sum())
    versions = sum(int(s.versions.sum()) if s.changes else s.version * len(s.tokens) for s in batch.samples)
    oldest = min((s.version for s in batch.samples if len(s.tokens)), default=step - 1)
    return {"lag": float(step - 1 - oldest), "lag/mean": step - 1 - versions / tokens if tokens else 0.0}


def credit_metrics(credit: Credit) -> Metrics:
    """The largest advantage, the length penalty, KL in the reward, tokens under entropy control, and the critic's fit."""
    columns = credit.columns
    assert columns.advantages is not None
    metrics = {"advantage/max_abs": float(np.abs(columns.advantages).max(initial=0.0))}
    if credit.length_penalty:
        metrics["reward/overlong"] = credit.length_penalty
    if credit.kl is not None:
        metrics["kl"] = credit.kl
    if credit.controlled is not None:
        metrics["entropy/controlled"] = credit.controlled
    if columns.returns is not None and columns.values is not None:
        variance = float(columns.returns.var())
        residual = float((columns.returns - columns.values).var())
        metrics["critic/value_mean"] = float(columns.values.mean())
        metrics["critic/explained_variance"] = 1 - residual / variance if variance else 0.0
    return metrics


def update_metrics(updates: list[Metrics]) -> Metrics:
    """Turns the policy's sums per update into means: per update for loss and gradient, per token for the rest.

    An update has `loss`, `grad_norm`, `lr`, and the number of its mini-batch's `tokens`, with sums over them: `clip_low`
    and `clip_high` (clipped tokens), and `mismatch`, which is |old - rollout|, an estimate for tokens that were not
    computed. `mismatch_max` is the largest that was computed. `kl` is a sum over the `computed` tokens, which are all
    where there is a KL term. Corrected samples add sums over their `corrected` tokens, those with an advantage: of
    `correction` weights, of their squares, and of `masked` tokens of weight 0.
    """
    if not updates:
        return {}
    sums = {name: sum(u[name] for u in updates) for name in updates[0]}
    tokens = sums["tokens"]
    metrics = {
        "loss": sums["loss"] / len(updates),
        "grad_norm": sums["grad_norm"] / len(updates),
        "lr": updates[-1]["lr"],
    }
    if not tokens:  # so there are no means
        return metrics
    metrics |= {
        "clip_fraction": (sums["clip_low"] + sums["clip_high"]) / tokens,
        "clip_fraction/low": sums["clip_low"] / tokens,
        "clip_fraction/high": sums["clip_high"] / tokens,
        "mismatch/mean_abs": sums["mismatch"] / tokens,
        "mismatch/max_abs": max(u["mismatch_max"] for u in updates),
    }
    if sums["computed"]:
        metrics["kl"] = sums["kl"] / sums["computed"]
    return metrics | (correction_metrics(sums) if sums.get("corrected") else {})


def correction_metrics(sums: Metrics) -> Metrics:
    """The mean correction weight, the share of masked tokens, and the effective sample size per token."""
    tokens = sums["corrected"]
    squares = sums["correction_squared"] * tokens
    return {
        "correction/mean": sums["correction"] / tokens,
        "correction/masked": sums["masked"] / tokens,
        "correction/effective_share": sums["correction"] ** 2 / squares if squares else 0.0,
    }


def critic_metrics(updates: list[Metrics]) -> Metrics:
    """Means over a step's updates of the critic's `loss` and `grad_norm`, and its last `lr`."""
    if not updates:
        return {}
    means = {f"critic/{name}": sum(u[name] for u in updates) / len(updates) for name in ("loss", "grad_norm")}
    return means | {"critic/lr": updates[-1]["lr"]}


SAMPLED_ONLY = ("clip_fraction", "mismatch/", "update/zero_advantage")  # of no meaning where nothing was sampled


def supervised_metrics(batch: Batch, credit: Credit, updates: StepUpdates) -> Metrics:
    """All metrics of a supervised step except times."""
    metrics = demonstration_metrics(batch) | update_metrics(updates.policy) | updates.counts
    without = SAMPLED_ONLY if credit.columns.ref is not None else (*SAMPLED_ONLY, "kl")
    return {name: value for name, value in metrics.items() if not name.startswith(without)}


def step_metrics(step: int, batch: Batch, credit: Credit, updates: StepUpdates, *, by_component: bool) -> Metrics:
    """All metrics of a step except times and versions."""
    if batch.is_shown:
        return supervised_metrics(batch, credit, updates)
    return (
        batch_metrics(batch, by_component)
        | sampled_entropy(batch)
        | update_metrics(updates.policy)
        | credit_metrics(credit)
        | critic_metrics(updates.critic)
        | updates.counts
        | lag_metrics(step, batch)
    )
