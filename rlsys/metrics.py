"""The figures of a step, each from its definition. Names are `metrics.jsonl`'s."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from rlsys.algorithms.credit import Credit
from rlsys.runs.timeline import span
from rlsys.sampling.dynamic_sampling import informative_groups
from rlsys.types import Batch, Metrics


class PhaseTimer:
    """Seconds per phase, which are spans of the driver's timeline too. `with clock("update"): ...` then `clock.metrics()["time/update"]`."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """`told` hears of each phase as it begins."""
        self.on_phase = on_phase
        self.start, self.phases = (
            time.perf_counter(),
            dict.fromkeys(("rollout", "reward", "score", "update", "sync"), 0.0),
        )

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        self.on_phase(phase)
        try:
            with span(phase):
                yield
        finally:
            self.phases[phase] += time.perf_counter() - began

    def move_seconds(self, phase: str, other: str, seconds: float) -> None:
        """Books up to `seconds` of a phase under another name."""
        moved = min(seconds, self.phases[phase])
        self.phases[phase] -= moved
        self.phases[other] += moved

    def metrics(self) -> Metrics:
        return {"time/step": time.perf_counter() - self.start} | {
            f"time/{name}": seconds for name, seconds in self.phases.items()
        }


def batch_metrics(batch: Batch, by_component: bool = False) -> Metrics:
    """Rewards, lengths and what the groups can teach; with `parts` by parts of their rewards too."""
    rewards, lengths = batch.rewards, batch.lengths
    sizes = np.bincount(batch.groups, minlength=len(batch.prompts))
    names = sorted({name for c in batch.components for name in c})
    found: Metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "reward/asked": float(batch.requested),
        "reward/failed": float(sum(batch.failures.values())),
        "groups/alone": float((sizes == 1).sum()),
        "groups/lost": float((sizes == 0).sum()),
        "groups/equal": float((~informative_groups(batch, by_component) & (sizes > 1)).sum()),
        "groups/dropped": float(batch.dropped_groups),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([s.finish == "length" for s in batch.samples])),
        "tokens": float(lengths.sum()),
    }
    found |= {f"failure/{reason}": float(n) for reason, n in batch.failures.items()}
    if batch.deferred:
        found["groups/left"] = float(len(batch.deferred))
    if len(names) > 1:
        found |= {f"reward/component/{n}": float(np.mean([c[n] for c in batch.components if n in c])) for n in names}
    return found


def lag_metrics(step: int, batch: Batch) -> Metrics:
    """How many updates lie between the weights a token was sampled from and those that it trains."""
    tokens = int(batch.lengths.sum())
    versions = sum(int(s.versions.sum()) if s.changes else s.version * len(s.tokens) for s in batch.samples)
    oldest = min((s.version for s in batch.samples if len(s.tokens)), default=step - 1)
    return {"lag": float(step - 1 - oldest), "lag/mean": step - 1 - versions / tokens if tokens else 0.0}


def credit_metrics(credit: Credit) -> Metrics:
    """What became of the rewards: the largest advantage, the length penalty, KL in the reward, the critic's grasp."""
    columns = credit.columns
    assert columns.advantages is not None
    found = {"advantage/max_abs": float(np.abs(columns.advantages).max(initial=0.0))}
    if credit.length_penalty:
        found["reward/overlong"] = credit.length_penalty
    if credit.kl is not None:
        found["kl"] = credit.kl
    if columns.returns is not None and columns.values is not None:
        spread = float(columns.returns.var())
        found["critic/value_mean"] = float(columns.values.mean())
        found["critic/explained_variance"] = (
            1 - float((columns.returns - columns.values).var()) / spread if spread else 0.0
        )
    return found


def update_metrics(updates: list[Metrics]) -> Metrics:
    """From the policy's per-update sums to means: per update for loss and gradient, per token for the rest.

    An update has `loss`, `grad_norm`, `lr` and the sums over its `tokens` of `kl`, `entropy`, `clip_low`, `clip_high` (tokens held
    by the clip) and `mismatch`, which is |old - rollout|, and its largest, `mismatch_max`; where samples are corrected, also of
    the `correction` weights, their squares, and of the tokens that weigh nothing.
    """
    if not updates:
        return {}
    total = {name: sum(u[name] for u in updates) for name in updates[0]}
    tokens = total["tokens"]
    found = {
        "loss": total["loss"] / len(updates),
        "grad_norm": total["grad_norm"] / len(updates),
        "lr": updates[-1]["lr"],
    }
    if not tokens:  # nothing was computed, and of nothing there are no means
        return found
    found |= {
        "kl": total["kl"] / tokens,
        "entropy": total["entropy"] / tokens,
        "clip_fraction": (total["clip_low"] + total["clip_high"]) / tokens,
        "clip_fraction/low": total["clip_low"] / tokens,
        "clip_fraction/high": total["clip_high"] / tokens,
        "mismatch/mean_abs": total["mismatch"] / tokens,
        "mismatch/max_abs": max(u["mismatch_max"] for u in updates),
    }
    if "correction" in total:
        squares = total["correction_squared"] * tokens
        found["correction/mean"] = total["correction"] / tokens
        found["correction/masked"] = total["masked"] / tokens
        found["correction/effective_share"] = total["correction"] ** 2 / squares if squares else 0.0
    return found


def critic_metrics(updates: list[Metrics]) -> Metrics:
    """Means over a step's updates of the critic's `loss` and `grad_norm`, and its last `lr`."""
    if not updates:
        return {}
    means = {f"critic/{name}": sum(u[name] for u in updates) / len(updates) for name in ("loss", "grad_norm")}
    return means | {"critic/lr": updates[-1]["lr"]}
